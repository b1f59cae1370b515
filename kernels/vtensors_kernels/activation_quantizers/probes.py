"""Linears with FP8 activations launched on small random weights, as bound for a request, against the reference.

The quantizer's codes and scales are compared bit for bit, NaN by being one. Products are compared with those of the
reference's codes in float32; tolerances are those of 16-bit activations, and one rounding more where scales are put
into x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import e4m3
from vtensors_formats.activations import ActivationQuantizer, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_formats.e8m0 import ExponentRule
from vtensors_formats.weight import Weight
from vtensors_kernels.activation_quantizers.fp8 import SOURCE, FP8Quantizer, Scaling, Written, scaling_of
from vtensors_kernels.arguments import scaled_x
from vtensors_kernels.compiling.functions import fingerprint
from vtensors_kernels.fp8.probes import random_fp8
from vtensors_kernels.nvfp4.probes import random_weight
from vtensors_kernels.probing import TOLERANCES, random_x
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.swiglu import swiglu

Call = Callable[..., Tensor]
# Rows of a part: whole sixteens for cuBLAS, whole blocks of scales where they are scaled, else a tail.
NATIVE_ROWS, BLOCK_ROWS, EMULATED_ROWS, EMULATED_BLOCK_ROWS = 48, 256, 43, 44
_TOKENS = (1, 7, 16, 32, 33, 64, 67)


def activations_for(request: KernelRequest) -> tuple[ActivationQuantizer, ...]:
    """Every quantizer that a weight of the request's scheme and precision may declare, on the request's device."""
    if request.activations == "fp8-static":
        # No power of two: an inexact division; and so small that some of `random_x` saturates.
        stored = torch.tensor(0.9 / 448, device=request.device)
        return (FP8StaticActivation(scale=stored),)
    match request.scheme:
        case "fp8-block":
            return FP8GroupActivation(), FP8TokenActivation()
        case "mxfp8":
            return tuple(
                MXFP8Activation(rule=rule) for rule in (ExponentRule.CEIL, ExponentRule.FLOOR_ROUNDED)
            )
        case _:
            return (FP8TokenActivation(),)


def probe_quantizer(request: KernelRequest, activation: ActivationQuantizer) -> None:
    """`FP8Quantizer` on rows of every size, zeros, infinities and NaN; codes, values and scales.

    Raises VtensorsError where they are not those of the reference.
    """
    x = awkward_x(request)
    m, k = x.shape
    wanted = activation.codes(x)
    kept = scaling_of(activation) in (Scaling.STORED, Scaling.TOKEN)
    others = (Written.VALUES,) if kept else (Written.ROUNDED,)
    for written in (Written.CODES, *others):
        quantized = FP8Quantizer(activation, k, x.dtype, x.device, written)(x)
        rows, scale = quantized.rows, quantized.scale
        if written is Written.CODES:
            values = e4m3.decode(wanted.codes)
            _same(e4m3.decode(rows), values, "codes")
        else:
            whole = activation(x) if written is Written.ROUNDED else e4m3.decode(wanted.codes).to(x.dtype)
            _same(rows, whole, "rows")
        if scale is not None:
            _same(scale, wanted.scale.reshape(m, -1), "scales")


def awkward_x(request: KernelRequest) -> Tensor:
    """[T, K]: rows of ordinary numbers of many sizes, then rows of zeros, one infinity and one NaN."""
    x = random_x(request, 24)
    sizes = torch.linspace(-14, 12, 20, device=x.device).exp2().to(x.dtype)
    x[:20] *= sizes[:, None]
    x[20] = 0.0
    x[21, 1:] = -0.0
    x[22, 3], x[23, -1] = float("inf"), float("nan")
    return x


def probe_linear(
    request: KernelRequest,
    bind: Callable[[Sequence[Weight], str], Call],
    *,
    rows: int,
    tokens: Sequence[int] = _TOKENS,
    invariant: bool = False,
    roundings: int = 1,
    activations: Sequence[ActivationQuantizer] = (),
) -> None:
    """The op on random weights of `rows` rows and the request's K, for each of the activations, or all it may declare.

    bind: weights, the op without norm and argmax -> its call. invariant: a row must be the same bits at any number of
    tokens. roundings: of operands and results. Raises VtensorsError where one is wrong.
    """
    op = _plain(request.op)
    paired = op == "linear_swiglu"
    count = 2 if paired else max(1, len(request.parts))
    for activation in activations or activations_for(request):
        probe_quantizer(request, activation)
        parts = [_weight(request, rows, i, activation) for i in range(count)]
        call = bind(parts, op)
        most = max(tokens)
        x = random_x(request, most)
        sums = [reference(x, part, activation) for part in parts]
        wanted, residual = swiglu(*sums) if paired else torch.cat(sums, dim=-1), None
        if op == "linear_add":
            between = torch.linspace(-2, 2, wanted.numel(), device=x.device).reshape(wanted.shape)
            residual = between.to(x.dtype)
            wanted = wanted + residual.float()
        whole = _called(call, x, residual)
        for m in tokens:
            ours = _called(call, x[:m], None if residual is None else residual[:m])
            what = f"{request.op} of {m} tokens, {type(activation).__name__}"
            _close(ours, wanted[:m], TOLERANCES[x.dtype] * (roundings + 2 * paired), what)
            if invariant:
                _same(ours, whole[:m], f"rows of {m} tokens")


def reference(x: Tensor, weight: Weight, activation: ActivationQuantizer) -> Tensor:
    """float32 [M, N]: codes and scales of the reference, nothing rounded behind them."""
    return linear(scaled_x(x, weight.pre_scale).float(), attrs.evolve(weight, pre_scale=None), activation)


def fingerprint_quantizer(request: KernelRequest) -> str:
    """What a verdict depends on: the quantizer's source, options and toolkit."""
    defines = {"VT_F16": int(request.dtype == "float16")}
    return fingerprint(SOURCE, defines, request.capability or (8, 0))


def _weight(request: KernelRequest, rows: int, seed: int, activation: ActivationQuantizer) -> Weight:
    make: Any = random_weight if request.scheme == "nvfp4" else random_fp8
    weight: Weight = make(request, rows, seed=seed, scale_factor=0.75**seed)
    return attrs.evolve(weight, activation=activation)


def _called(call: Call, x: Tensor, residual: Tensor | None) -> Tensor:
    return call(x) if residual is None else call(x, residual)


def _plain(op: str) -> str:
    op = op.removeprefix("norm_")
    return "linear" if op in ("linears", "linear_argmax") else op


def _same(ours: Tensor, wanted: Tensor, what: str) -> None:
    a, b = ours.float(), wanted.float()
    wrong = (a != b) & ~(a.isnan() & b.isnan())
    if bool(wrong.any()):
        raise VtensorsError(f"the self-test failed: {what} differ", seen=f"{int(wrong.sum())} of {b.numel()}")


def _close(ours: Tensor, wanted: Tensor, accepted: float, what: str) -> None:
    error = float((ours.float() - wanted).norm() / wanted.norm())
    # Written so that NaN fails.
    if not error < accepted:
        raise VtensorsError(
            f"the self-test failed: {what}", seen=f"relative error {error:.1e}", accepted=f"{accepted}"
        )
