"""How the kernels of FP8 activations are bound and tested, by kernel; imported when one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors.records import KernelRequest, KernelSpec
from vtensors_formats.dynamic_activations import FP8GroupActivation
from vtensors_formats.weight import Weight
from vtensors_kernels.activation_quantizers import probes
from vtensors_kernels.activation_quantizers.linears import (
    QuantizedInputMatrix,
    QuantizedStream,
    quantized_first,
)
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.stacked import StackedFP8, stack_fp8
from vtensors_kernels.fp8.w8a8 import W8A8Linear
from vtensors_kernels.nvfp4 import finish
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.probing import fingerprint_of
from vtensors_plugins.backends.cuda_calls import for_op
from vtensors_plugins.backends.cuda_w8a8 import as_16_bits

Call = Callable[..., Tensor]
# Most rows M of a self-test.
_MOST = 67


def with_activation(
    plain: KernelSpec, weights: Sequence[Any], request: KernelRequest
) -> QuantizedInputMatrix:
    """The weights as the kernel of 16-bit activations reads them, and their quantizer.

    Raises RequestError where the weight declares none; what `prepare` of that kernel raises.
    """
    activation = _declared(weights[0], request)
    if plain.prepare is None:
        raise RequestError("an emulated kernel reads packed weights", seen=plain.name)
    return QuantizedInputMatrix(packed=plain.prepare(weights, request), activation=activation)


def bind_native(weight: Any, request: KernelRequest) -> Call:
    """The op by cuBLAS, of an FP8Weight as stored or a StackedFP8."""
    stacked = weight if isinstance(weight, StackedFP8) else stack_fp8([weight])
    _check(stacked.activation.kind, request)
    return for_op(request.op, W8A8Linear(stacked, _dtype(request), _plain(request.op)))


def probe_native(request: KernelRequest) -> None:
    """The self-test of `bind_native`; raises VtensorsError where it is wrong."""
    blocks = request.scheme == "fp8-block"

    def bind(weights: Sequence[Any], op: str) -> Call:
        return W8A8Linear(stack_fp8(weights, paired=op == "linear_swiglu"), _dtype(request), op)

    probes.probe_linear(
        request,
        bind,
        rows=probes.BLOCK_ROWS if blocks else probes.NATIVE_ROWS,
        tokens=(1, 7, 16, 33, 64, 67),
        activations=(FP8GroupActivation(),) if blocks else (),
    )


def fingerprint_native(request: KernelRequest) -> str:
    """What a verdict of that self-test depends on."""
    quantizer = probes.fingerprint_quantizer(request)
    return f"{quantizer} {fingerprint_of(request, finish.SOURCE)} torch {torch.__version__}"


def bind_emulated(plain: KernelSpec, matrix: QuantizedInputMatrix, request: KernelRequest) -> Call:
    """The op by a kernel of 16-bit activations behind the quantizer."""
    dtype, op = _dtype(request), request.op
    if _streams(plain):
        return for_op(op, QuantizedStream(matrix, dtype, _plain(op)))
    call = quantized_first(matrix, dtype, lambda packed: plain.bind(packed, as_16_bits(request)))
    # It computes an argmax itself.
    return for_op(op.replace("linear_argmax", "linear"), call)


def probe_emulated(plain: KernelSpec, request: KernelRequest) -> None:
    """The self-test of `bind_emulated`; raises VtensorsError where it is wrong.

    An argmax is that of the kernel of 16-bit activations, tested as such.
    """
    asked = attrs.evolve(as_16_bits(request), op=_plain(request.op))
    if request.op == "linear_argmax" and not _streams(plain) and plain.probe is not None:
        plain.probe(as_16_bits(request))

    def bind(weights: Sequence[Weight], op: str) -> Call:
        packed: Any = pack if request.scheme == "nvfp4" else pack_fp8
        matrix = QuantizedInputMatrix(
            packed=packed(weights, paired=op == "linear_swiglu"), activation=_declared(weights[0], request)
        )
        if _streams(plain):
            return QuantizedStream(matrix, _dtype(request), op, rows=_shape(request)[0])
        return quantized_first(matrix, _dtype(request), lambda found: plain.bind(found, asked))

    first, last = request.tokens[0], min(request.tokens[1] or _MOST, _MOST)
    rounded = not _streams(plain) or request.scheme in ("fp8-block", "mxfp8")
    probes.probe_linear(
        request,
        bind,
        rows=probes.EMULATED_BLOCK_ROWS if request.scheme == "fp8-block" else probes.EMULATED_ROWS,
        tokens=sorted({m for m in (1, 7, 8, 16, 17, 32, 33, 47, first, last) if first <= m <= last}),
        invariant=bool(plain.sums),
        roundings=1 + rounded + (request.scheme == "fp8-block" and not plain.sums),
    )


def fingerprint_emulated(plain: KernelSpec, request: KernelRequest) -> str:
    """What a verdict of that self-test depends on."""
    behind = "" if plain.fingerprint is None else plain.fingerprint(as_16_bits(request))
    return f"{probes.fingerprint_quantizer(request)} {behind}"


def _streams(plain: KernelSpec) -> bool:
    """Whether sums of tokens can be scaled."""
    return "_stream" in plain.name


def _declared(weight: Any, request: KernelRequest) -> Any:
    activation = weight.activation
    _check("16bit" if activation is None else activation.kind, request)
    return activation


def _check(kind: str, request: KernelRequest) -> None:
    if kind != request.activations:
        raise RequestError(
            f"cannot run {request.activations} activations",
            seen=f"the weight declares {kind}",
            accepted=kind,
        )


def _plain(op: str) -> str:
    """The op without a norm before it or an argmax behind it; `linears` is one `linear` once stacked."""
    op = op.removeprefix("norm_")
    return "linear" if op in ("linears", "linear_argmax") else op


def _dtype(request: KernelRequest) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype


def _shape(request: KernelRequest) -> tuple[int, int]:
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    return request.shape
