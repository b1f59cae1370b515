"""NVFP4 kernels on CUDA: one record per op and kernel, named `<op>_nvfp4_<kernel>`.

    kernel            rows M   weight                          devices
    stream            1..32    packed                          any
    wgmma_segments    17..32   packed                          sm_90a
    wgmma             33..64   packed                          sm_90a
    packed_widening   any      packed                          any
    stored            1..64    as stored: small, or shared     any
    widening          any      as stored                       any

Packed weights are made once at load. `stream` and `wgmma_segments` give a row the same bits at any number of rows; the
latter has no form with a norm, which the kernel `rms_norm` makes before it, with the bits of that in `stream`. Where
other kernels compute no norm, the same does; where one computes no argmax, torch does behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.records import KernelRequest, KernelSpec
from vtensors_plugins.backends.cuda_requests import fingerprint_line, norm_refusal, refusal

if TYPE_CHECKING:
    from vtensors_formats import NVFP4Weight
    from vtensors_kernels.nvfp4.packed import PackedNVFP4

Call = Callable[..., Any]
Refuse = Callable[[KernelRequest], str | None]
PACKED_OPS = (
    "linear",
    "linears",
    "linear_add",
    "linear_swiglu",
    "norm_linears",
    "norm_linear_swiglu",
    "linear_argmax",
)
STORED_OPS = ("linear", "linear_argmax")
NUMERICS = "16-bit outputs, float32 sums"
# The order of sums of `stream` and `wgmma_segments`: eight segments of a row, by K alone, in a balanced tree.
SUMS = "eight-segments"
# What lays out x for warpgroup products, and the norm that it may do on the way.
STAGING_SOURCES = ("sm90/permute_activations.cu", "sm90/norm_activations.cu", "common/rms_norm.cu")
# Weights per scale that the kernels know.
_GROUPS = (16, 32)
# Blocks of the packed layout that one launch may span on sm_90a; columns of the kernel without repack.
WGMMA_BLOCKS, _STORED_COLUMNS = 1 << 24, 1 << 28


def nvfp4_kernels() -> list[KernelSpec]:
    """Every NVFP4 kernel of the CUDA backend."""
    return [
        *(_stream(op) for op in PACKED_OPS),
        *(_wgmma_segments(op) for op in PACKED_OPS),
        *(_wgmma(op) for op in PACKED_OPS),
        *(_packed_widening(op) for op in PACKED_OPS),
        *(_stored(op) for op in STORED_OPS),
        *(_widening(op) for op in STORED_OPS),
        _embedding(),
    ]


def _stream(op: str) -> KernelSpec:
    return _packed(
        op, "stream", tokens=(1, 32), refuse=_refuse_stream, fingerprint=_fingerprint_stream, sums=SUMS
    )


def _wgmma(op: str) -> KernelSpec:
    return _packed(
        op,
        "wgmma",
        tokens=(33, 64),
        refuse=_refuse_wgmma,
        fingerprint=_depends_on("sm90/linear_nvfp4_wgmma.cu", *STAGING_SOURCES),
        targets=("sm_90a",),
    )


def _wgmma_segments(op: str) -> KernelSpec:
    return _packed(
        op,
        "wgmma_segments",
        tokens=(17, 32),
        refuse=_refuse_segments,
        fingerprint=_depends_on("sm90/linear_nvfp4_wgmma_segments.cu", *STAGING_SOURCES),
        targets=("sm_90a",),
        sums=SUMS,
    )


def _packed_widening(op: str) -> KernelSpec:
    sources = ("repack_nvfp4.cu", "dequantize_packed_nvfp4.cu", "finish_widened_nvfp4.cu")
    return _packed(
        op,
        "packed_widening",
        tokens=(1, None),
        refuse=_refuse,
        fingerprint=_depends_on(*(f"common/{name}" for name in sources)),
    )


def _packed(
    op: str,
    kernel: str,
    *,
    tokens: tuple[int, int | None],
    refuse: Refuse,
    fingerprint: Callable[[KernelRequest], str],
    targets: tuple[str, ...] = ("cuda",),
    sums: str = "",
) -> KernelSpec:
    return KernelSpec(
        name=f"{op}_nvfp4_{kernel}",
        op=op,
        schemes=("nvfp4",),
        targets=targets,
        numerics=NUMERICS,
        refuse=refuse,
        bind=_bind(kernel),
        cost=_cost(kernel),
        layout="nvfp4-packed-pairs" if op.endswith("swiglu") else "nvfp4-packed",
        prepare=_prepare,
        sums=sums,
        tokens=tokens,
        probe=_probe(kernel),
        fingerprint=fingerprint,
    )


def _stored(op: str) -> KernelSpec:
    return KernelSpec(
        name=f"{op}_nvfp4_stored",
        op=op,
        schemes=("nvfp4",),
        targets=("cuda",),
        numerics=NUMERICS,
        refuse=_refuse_stored,
        bind=_bind("stored"),
        cost=_cost("stored"),
        sums="stored",
        tokens=(1, 64),
        probe=_probe("stored"),
        fingerprint=_depends_on("common/linear_nvfp4_stored.cu", "common/pick_largest.cu"),
    )


def _widening(op: str) -> KernelSpec:
    return KernelSpec(
        name=f"{op}_nvfp4_widening",
        op=op,
        schemes=("nvfp4",),
        targets=("cuda",),
        numerics=NUMERICS,
        refuse=_refuse,
        bind=_bind("widening"),
        cost=_cost("widening"),
        probe=_probe("widening"),
        fingerprint=_depends_on("common/dequantize_nvfp4.cu"),
    )


def _embedding() -> KernelSpec:
    return KernelSpec(
        name="embedding_nvfp4",
        op="embedding",
        schemes=("nvfp4",),
        targets=("cuda",),
        numerics="bitwise",
        refuse=_refuse,
        bind=_bind("embedding"),
        cost=_cost("embedding"),
        probe=_probe("embedding"),
        fingerprint=_depends_on("common/embedding_nvfp4.cu"),
    )


def _bind(kernel: str) -> Callable[[Any, KernelRequest], Call]:
    def bind(prepared: Any, request: KernelRequest) -> Call:
        from vtensors_plugins.backends import cuda_nvfp4_binding

        return cuda_nvfp4_binding.BINDERS[kernel](prepared, request)

    return bind


def _probe(kernel: str) -> Callable[[KernelRequest], None]:
    def probe(request: KernelRequest) -> None:
        from vtensors_plugins.backends import cuda_nvfp4_binding

        cuda_nvfp4_binding.PROBES[kernel](request)

    return probe


def _prepare(weights: Sequence[NVFP4Weight], request: KernelRequest) -> PackedNVFP4:
    from vtensors_kernels.nvfp4.repack import pack

    return pack(weights, paired=request.op.endswith("swiglu"))


def _cost(kernel: str) -> Callable[[KernelRequest], float]:
    def cost(request: KernelRequest) -> float:
        from vtensors_kernels.nvfp4 import costs

        return costs.COSTS[kernel](request)

    return cost


def _depends_on(*sources: str) -> Callable[[KernelRequest], str]:
    def fingerprint(request: KernelRequest) -> str:
        from vtensors_kernels.probing import fingerprint_of

        return fingerprint_line(request, fingerprint_of(request, *sources))

    return fingerprint


def _fingerprint_stream(request: KernelRequest) -> str:
    from vtensors_kernels.nvfp4.stream_probe import fingerprint_stream

    return fingerprint_line(request, fingerprint_stream(request))


# ---- why not


def _refuse(request: KernelRequest) -> str | None:
    known = {f"group{size}" for size in _GROUPS}
    for trait in sorted(request.traits):
        if trait.startswith("group") and trait not in known:
            return f"knows groups of {' or '.join(map(str, _GROUPS))}, not of {trait.removeprefix('group')}"
    if request.shape is not None and request.shape[1] % 16:
        return f"needs K to be a multiple of 16, not {request.shape[1]}"
    return refusal(request)


def _refuse_stream(request: KernelRequest) -> str | None:
    if request.op.startswith("norm_") and "pre_scale" in request.traits:
        return "a norm and a pre-scale round x twice; the kernel does it once"
    if request.shape is not None and request.capability is not None:
        from vtensors_kernels.compiling.architectures import target_of
        from vtensors_kernels.nvfp4.stream_form import serves

        if not serves(request.shape[1], target_of(request.capability)):
            return f"a row of {request.shape[1]} columns does not fit into shared memory"
    return _refuse(request)


def _refuse_wgmma(request: KernelRequest) -> str | None:
    if request.shape is not None:
        n, k = request.shape
        if -(-n // 16) * -(-k // 128) >= WGMMA_BLOCKS:
            return f"spans fewer than {WGMMA_BLOCKS} blocks of 16 x 128, not those of {n} x {k}"
    return _refuse(request)


def _refuse_segments(request: KernelRequest) -> str | None:
    return _refuse_wgmma(request) or norm_refusal(request)


def _refuse_stored(request: KernelRequest) -> str | None:
    if request.shape is not None and request.shape[1] >= _STORED_COLUMNS:
        return f"takes fewer than {_STORED_COLUMNS} columns, not {request.shape[1]}"
    return _refuse(request)
