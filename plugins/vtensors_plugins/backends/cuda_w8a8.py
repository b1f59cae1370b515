"""FP8 activations on CUDA: one record per op and kernel.

    kernel                                rows M   weight          devices
    <op>_fp8_w8a8                         any      as stored (*)   sm_89 and newer: FP8 tensor cores, by cuBLAS
    <op>_fp8_w8a8_block                   any      as stored (*)   sm_90a, by cuBLAS: blocks and groups of 128
    <op>_fp8_w8a8_emulated_<kernel>       those of <op>_fp8_<kernel>, for any weight that it serves
    <op>_nvfp4_w4a8_emulated_<kernel>     those of <op>_nvfp4_<kernel>

(*) Parts of a fused op are put below each other once, at load. Emulated: a kernel of ours quantizes x, the kernels of
16-bit activations multiply the codes, exact in 16 bits. cuBLAS promises no order of sums; the emulated kernel of few
rows gives a row the same bits at any number of rows: `VT_KERNELS=fp8-*:*_emulated*` takes it where cuBLAS would be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from vtensors.records import KernelRequest, KernelSpec
from vtensors_plugins.backends.cuda_fp8 import fp8_kernels
from vtensors_plugins.backends.cuda_nvfp4 import PACKED_OPS, nvfp4_kernels
from vtensors_plugins.backends.cuda_requests import fingerprint_line, refusal

if TYPE_CHECKING:
    from vtensors_formats import FP8Weight
    from vtensors_kernels.activation_quantizers.linears import QuantizedInputMatrix
    from vtensors_kernels.fp8.stacked import StackedFP8

Call = Callable[..., Any]
Refuse = Callable[[KernelRequest], str | None]
OPS = PACKED_OPS
# Those that read one weight: nothing is put together for them.
SINGLE_OPS = ("linear", "linear_add", "linear_argmax")
BLOCK_OPS = tuple(op for op in OPS if not op.endswith("swiglu"))
FP8_ACTIVATIONS = ("fp8-static", "fp8-dynamic")
NUMERICS = "16-bit outputs, float32 sums of FP8 products"
_EMULATED = "16-bit outputs, float32 sums; scales of groups, and of tokens beyond 64 rows, round x to 16 bits"
# Of the tensor cores that cuBLAS multiplies FP8 with.
_FP8_CAPABILITY = (8, 9)
_MULTIPLE, _BLOCK, _BLOCK_COLUMNS = 16, 128, 512
# Of weights whose dynamic activations have a scale per token.
_TOKEN_SCHEMES = ("fp8-tensor", "fp8-row")
# How names begin -> the kernels of 16-bit activations behind the quantizer.
EMULATED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp8_w8a8_emulated": (
            "fp8_stream",
            "fp8_stream_in_parts",
            "fp8_wgmma_segments",
            "fp8_wgmma_segments_in_parts",
            "fp8_packed_widening",
        ),
        "nvfp4_w4a8_emulated": (
            "nvfp4_stream",
            "nvfp4_wgmma_segments",
            "nvfp4_wgmma",
            "nvfp4_packed_widening",
        ),
    }
)
_BASES: Mapping[str, KernelSpec] = MappingProxyType(
    {kernel.name: kernel for kernel in (*fp8_kernels(), *nvfp4_kernels())}
)


def w8a8_kernels() -> list[KernelSpec]:
    """Every kernel of the CUDA backend that takes FP8 activations."""
    return [
        *(_native(op) for op in OPS),
        *(_native_block(op) for op in BLOCK_OPS),
        *(_emulated(op, prefix, base) for prefix, bases in EMULATED.items() for base in bases for op in OPS),
    ]


def _native(op: str) -> KernelSpec:
    return _cublas(op, "fp8_w8a8", ("fp8-tensor", "fp8-row"), ("cuda",), _refuse_native)


def _native_block(op: str) -> KernelSpec:
    return _cublas(op, "fp8_w8a8_block", ("fp8-block",), ("sm_90a",), _refuse_block)


def _cublas(
    op: str, kernel: str, schemes: tuple[str, ...], targets: tuple[str, ...], refuse: Refuse
) -> KernelSpec:
    single = op in SINGLE_OPS
    stacked = "fp8-stacked-pairs" if op.endswith("swiglu") else "fp8-stacked"
    return KernelSpec(
        name=f"{op}_{kernel}",
        op=op,
        schemes=schemes,
        targets=targets,
        numerics=NUMERICS,
        refuse=refuse,
        bind=_bind_native,
        cost=_native_cost,
        layout="stored" if single else stacked,
        prepare=None if single else _stack,
        probe=_probe_native,
        fingerprint=_fingerprint_native,
    )


def _emulated(op: str, prefix: str, base: str) -> KernelSpec:
    plain = _BASES[f"{op.removeprefix('norm_')}_{base}"]
    return KernelSpec(
        name=f"{op}_{prefix}_{base.partition('_')[2]}",
        op=op,
        schemes=plain.schemes,
        targets=plain.targets,
        numerics=_EMULATED,
        refuse=_refuse_emulated(plain),
        bind=_bind_emulated(plain),
        cost=_emulated_cost(plain),
        sums=plain.sums,
        layout=plain.layout,
        prepare=_with_activation(plain),
        tokens=plain.tokens,
        probe=_probe_emulated(plain),
        fingerprint=_fingerprint_emulated(plain),
    )


def _bind_native(prepared: Any, request: KernelRequest) -> Call:
    from vtensors_plugins.backends import cuda_w8a8_binding

    return cuda_w8a8_binding.bind_native(prepared, request)


def _probe_native(request: KernelRequest) -> None:
    from vtensors_plugins.backends import cuda_w8a8_binding

    cuda_w8a8_binding.probe_native(request)


def _fingerprint_native(request: KernelRequest) -> str:
    from vtensors_plugins.backends import cuda_w8a8_binding

    return fingerprint_line(request, cuda_w8a8_binding.fingerprint_native(request))


def _bind_emulated(plain: KernelSpec) -> Callable[[Any, KernelRequest], Call]:
    def bind(prepared: Any, request: KernelRequest) -> Call:
        from vtensors_plugins.backends import cuda_w8a8_binding

        return cuda_w8a8_binding.bind_emulated(plain, prepared, request)

    return bind


def _probe_emulated(plain: KernelSpec) -> Callable[[KernelRequest], None]:
    def probe(request: KernelRequest) -> None:
        from vtensors_plugins.backends import cuda_w8a8_binding

        cuda_w8a8_binding.probe_emulated(plain, request)

    return probe


def _fingerprint_emulated(plain: KernelSpec) -> Callable[[KernelRequest], str]:
    def fingerprint(request: KernelRequest) -> str:
        from vtensors_plugins.backends import cuda_w8a8_binding

        return fingerprint_line(request, cuda_w8a8_binding.fingerprint_emulated(plain, request))

    return fingerprint


def _stack(weights: Sequence[FP8Weight], request: KernelRequest) -> StackedFP8:
    from vtensors_kernels.fp8.stacked import stack_fp8

    return stack_fp8(weights, paired=request.op.endswith("swiglu"))


def _with_activation(plain: KernelSpec) -> Callable[[Sequence[Any], KernelRequest], QuantizedInputMatrix]:
    def prepare(weights: Sequence[Any], request: KernelRequest) -> QuantizedInputMatrix:
        from vtensors_plugins.backends import cuda_w8a8_binding

        return cuda_w8a8_binding.with_activation(plain, weights, request)

    return prepare


def _native_cost(request: KernelRequest) -> float:
    from vtensors_kernels.activation_quantizers import costs

    return costs.native_cost(request)


def _emulated_cost(plain: KernelSpec) -> Callable[[KernelRequest], float]:
    def cost(request: KernelRequest) -> float:
        from vtensors_kernels.activation_quantizers import costs

        alone = plain.cost(as_16_bits(request)) if callable(plain.cost) else plain.cost
        return costs.emulated_cost(request, alone)

    return cost


def as_16_bits(request: KernelRequest) -> KernelRequest:
    """What the kernel behind quantizer and norm is asked for."""
    return attrs.evolve(request, op=request.op.removeprefix("norm_"), activations="16bit")


# ---- why not


def _refuse_native(request: KernelRequest) -> str | None:
    if (reason := refusal(request, FP8_ACTIVATIONS)) is not None:
        return reason
    if request.capability is not None and request.capability < _FP8_CAPABILITY:
        found = f"{request.capability[0]}.{request.capability[1]}"
        return f"needs FP8 tensor cores, compute capability 8.9 or newer, not {found}"
    if request.shape is not None:
        rows = 2 * _MULTIPLE if request.op.endswith("swiglu") else _MULTIPLE
        n, k = request.shape
        if n % rows or k % _MULTIPLE:
            return f"needs N to be a multiple of {rows} and K of {_MULTIPLE}, not {n} x {k}"
    return None


def _refuse_block(request: KernelRequest) -> str | None:
    if (reason := _refuse_native(request)) is not None:
        return reason
    if any(trait.startswith("block") for trait in request.traits):
        return f"knows blocks of {_BLOCK} x {_BLOCK} alone"
    if any(rows % _BLOCK for rows in request.parts[:-1]):
        return f"stacks parts of a multiple of {_BLOCK} rows, not of {list(request.parts)}"
    if request.shape is not None and request.shape[1] % _BLOCK_COLUMNS:
        return f"needs K to be a multiple of {_BLOCK_COLUMNS}, not {request.shape[1]}"
    if request.activations == "fp8-static":
        return "scales groups of x, which one stored scale has none of"
    return None


def _refuse_emulated(plain: KernelSpec) -> Refuse:
    def refuse(request: KernelRequest) -> str | None:
        if (reason := refusal(request, FP8_ACTIVATIONS)) is not None:
            return reason
        if request.activations == "fp8-dynamic":
            if any(trait.startswith("block") for trait in request.traits):
                return f"scales groups of {_BLOCK} columns of x, as blocks of {_BLOCK} x {_BLOCK} have them"
            if "_wgmma" in plain.name and request.scheme in _TOKEN_SCHEMES:
                return "cannot scale the sums of a token"
        return plain.refuse(as_16_bits(request))

    return refuse
