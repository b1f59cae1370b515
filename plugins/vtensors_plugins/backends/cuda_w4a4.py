"""NVFP4 weights with NVFP4 activations on CUDA: one record per op and kernel, named `<op>_nvfp4_w4a4_<kernel>`.

    kernel                       rows M   weight                  devices
    block_scaled                 any      packed for mma.sync     sm_120a, sm_121a
    cublas                       any      scales in tiles         sm_100a, sm_103a
    emulated_stream              1..32    packed, 16-bit          any
    emulated_wgmma_segments      17..32   packed, 16-bit          sm_90a
    emulated_wgmma               33..64   packed, 16-bit          sm_90a
    emulated_packed_widening     any      packed, 16-bit          any

Each quantizes x in a launch of its own, an RMSNorm in front included. The emulated ones hand code * block scale, which
is exact in 16 bits, to the kernel for 16-bit activations of that name: the same numbers but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.records import KernelRequest, KernelSpec
from vtensors_kernels.nvfp4.w4a4_requests import sixteen_bits
from vtensors_plugins.backends.cuda_nvfp4 import NUMERICS, SUMS, nvfp4_kernels
from vtensors_plugins.backends.cuda_requests import fingerprint_line, refusal

if TYPE_CHECKING:
    from vtensors_formats import NVFP4Weight

Call = Callable[..., Any]
W4A4_OPS = ("linear", "linears", "linear_add", "linear_swiglu", "norm_linears", "norm_linear_swiglu")
EMULATED = ("stream", "wgmma_segments", "wgmma", "packed_widening")
NATIVE_SUMS = "eight-warps"
_W4A4_NUMERICS = f"activations bit for bit the reference's codes; {NUMERICS}"
_QUANTIZER = "common/quantize_nvfp4.cu"
_NATIVE = {
    "block_scaled": (("sm_120a", "sm_121a"), "nvfp4-block-scaled", ("sm120/linear_nvfp4_w4a4.cu",)),
    "cublas": (("sm_100a", "sm_103a"), "nvfp4-tiled-scales", ("common/finish_widened_nvfp4.cu",)),
}
# torch asks for whole 16-byte rows of 4-bit operands.
_CUBLAS_COLUMNS = 32


def w4a4_kernels() -> list[KernelSpec]:
    """Every kernel of the CUDA backend with NVFP4 activations."""
    plain = {kernel.name: kernel for kernel in nvfp4_kernels()}
    return [
        *(_native(op, kernel) for kernel in _NATIVE for op in W4A4_OPS),
        *(
            _emulated(op, kernel, plain[f"{op.removeprefix('norm_')}_nvfp4_{kernel}"])
            for kernel in EMULATED
            for op in W4A4_OPS
        ),
    ]


def _native(op: str, kernel: str) -> KernelSpec:
    targets, layout, sources = _NATIVE[kernel]
    return KernelSpec(
        name=f"{op}_nvfp4_w4a4_{kernel}",
        op=op,
        schemes=("nvfp4",),
        targets=targets,
        numerics=_W4A4_NUMERICS,
        refuse=_refuse_cublas if kernel == "cublas" else _refuse,
        bind=_bind(kernel),
        cost=_cost(kernel),
        layout=f"{layout}-pairs" if op.endswith("swiglu") else layout,
        prepare=_prepare(kernel),
        sums=NATIVE_SUMS if kernel == "block_scaled" else "",
        probe=_probe(kernel),
        fingerprint=_depends_on(*sources),
    )


def _emulated(op: str, kernel: str, plain: KernelSpec) -> KernelSpec:
    """plain: the record of the kernel for 16-bit activations and the op without a norm."""

    def refuse(request: KernelRequest) -> str | None:
        return _refuse(request) or plain.refuse(sixteen_bits(request))

    def fingerprint(request: KernelRequest) -> str:
        own = plain.fingerprint(sixteen_bits(request)) if plain.fingerprint is not None else ""
        return f"{_depends_on()(request)} {own}"

    return KernelSpec(
        name=f"{op}_nvfp4_w4a4_emulated_{kernel}",
        op=op,
        schemes=("nvfp4",),
        targets=plain.targets,
        numerics=_W4A4_NUMERICS,
        refuse=refuse,
        bind=_bind(kernel),
        cost=_cost(kernel),
        layout="nvfp4-packed-w4a4-pairs" if op.endswith("swiglu") else "nvfp4-packed-w4a4",
        prepare=_prepare("emulated"),
        sums=SUMS if plain.sums else "",
        tokens=plain.tokens,
        probe=_probe(kernel),
        fingerprint=fingerprint,
    )


def _bind(kernel: str) -> Callable[[Any, KernelRequest], Call]:
    def bind(prepared: Any, request: KernelRequest) -> Call:
        from vtensors_plugins.backends import cuda_w4a4_binding

        return cuda_w4a4_binding.bind_w4a4(kernel, prepared, request)

    return bind


def _prepare(kernel: str) -> Callable[[Sequence[NVFP4Weight], KernelRequest], Any]:
    def prepare(weights: Sequence[NVFP4Weight], request: KernelRequest) -> Any:
        from vtensors_plugins.backends import cuda_w4a4_binding

        return cuda_w4a4_binding.PACKERS[kernel](weights, paired=request.op.endswith("swiglu"))

    return prepare


def _probe(kernel: str) -> Callable[[KernelRequest], None]:
    def probe(request: KernelRequest) -> None:
        from vtensors_plugins.backends import cuda_w4a4_binding

        cuda_w4a4_binding.probe_w4a4_kernel(kernel, request)

    return probe


def _cost(kernel: str) -> Callable[[KernelRequest], float]:
    def cost(request: KernelRequest) -> float:
        from vtensors_kernels.nvfp4 import w4a4_costs

        if kernel == "block_scaled":
            return w4a4_costs.block_scaled_cost(request)
        if kernel == "cublas":
            return w4a4_costs.cublas_cost(request)
        return w4a4_costs.emulated_cost(kernel, request)

    return cost


def _depends_on(*sources: str) -> Callable[[KernelRequest], str]:
    def fingerprint(request: KernelRequest) -> str:
        from vtensors_kernels.probing import fingerprint_of

        return fingerprint_line(request, fingerprint_of(request, _QUANTIZER, *sources))

    return fingerprint


# ---- why not


def _refuse(request: KernelRequest) -> str | None:
    if request.activations != "fp4":
        return f"computes with fp4 activations, not {request.activations}"
    if request.op.startswith("norm_") and "pre_scale" in request.traits:
        return "a norm and a pre-scale round x twice; the kernel does it once"
    for trait in sorted(request.traits):
        if trait.startswith("group") and trait != "group32":
            return f"knows groups of 16 or 32, not of {trait.removeprefix('group')}"
    if request.shape is not None and request.shape[1] % 16:
        return f"needs K to be a multiple of 16, not {request.shape[1]}"
    return refusal(sixteen_bits(request))


def _refuse_cublas(request: KernelRequest) -> str | None:
    if reason := _refuse(request):
        return reason
    if request.shape is not None and request.shape[1] % _CUBLAS_COLUMNS:
        return f"needs K to be a multiple of {_CUBLAS_COLUMNS}, not {request.shape[1]}"
    if request.assumed:
        return None
    from vtensors_kernels.nvfp4.w4a4_cublas import why_not_torch

    return why_not_torch()
