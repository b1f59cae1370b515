"""FP8 and MXFP8 kernels on CUDA with 16-bit activations: one record per op and kernel, named `<op>_fp8_<kernel>`.

    kernel                    rows M   weight    devices
    stream                    1..32    packed    any
    wgmma_segments            17..32   packed    sm_90a
    stream_in_parts           33..64   packed    any: the same kernel, twice
    wgmma_segments_in_parts   33..64   packed    sm_90a: the same kernel, twice
    packed_widening           any      packed    any

Packed weights are made once at load. `stream` and `wgmma_segments` give a row the same bits; the latter has no form for
scales of 128 x 128 blocks, which are of the sums of a column step. Norms and argmax around a kernel are as for NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from vtensors.records import KernelRequest, KernelSpec
from vtensors_plugins.backends.cuda_nvfp4 import NUMERICS, PACKED_OPS, STAGING_SOURCES, SUMS, WGMMA_BLOCKS
from vtensors_plugins.backends.cuda_requests import fingerprint_line, norm_refusal, refusal

if TYPE_CHECKING:
    from vtensors_kernels.fp8.packed import PackedFP8
    from vtensors_kernels.fp8.scales import FP8

Call = Callable[..., Any]
SCHEMES = ("fp8-tensor", "fp8-row", "fp8-block", "mxfp8")
_SEGMENTS_SCHEMES = ("fp8-tensor", "fp8-row", "mxfp8")
# The packed layout has a scale for so many rows and columns of a block-scaled weight.
_SCALE_ROWS, _SCALE_COLUMNS = 4, 128

_WIDENED_NUMERICS = f"{NUMERICS}; weights with block scales rounded once to 16 bits"


def fp8_kernels() -> list[KernelSpec]:
    """Every FP8 kernel of the CUDA backend that reads packed weights."""
    return [
        *(_stream(op, "stream", (1, 32)) for op in PACKED_OPS),
        *(_stream(op, "stream_in_parts", (33, 64)) for op in PACKED_OPS),
        *(_segments(op, "wgmma_segments", (17, 32)) for op in PACKED_OPS),
        *(_segments(op, "wgmma_segments_in_parts", (33, 64)) for op in PACKED_OPS),
        *(
            _packed(op, "packed_widening", (1, None), _refuse, _fingerprint_widening, _probe_widening)
            for op in PACKED_OPS
        ),
    ]


def _stream(op: str, kernel: str, tokens: tuple[int, int]) -> KernelSpec:
    return _packed(op, kernel, tokens, _refuse_stream, _fingerprint_stream, _probe_stream)


def _segments(op: str, kernel: str, tokens: tuple[int, int]) -> KernelSpec:
    spec = _packed(op, kernel, tokens, _refuse_segments, _fingerprint_segments, _probe_segments)
    return attrs.evolve(spec, schemes=_SEGMENTS_SCHEMES, targets=("sm_90a",))


def _packed(
    op: str,
    kernel: str,
    tokens: tuple[int, int | None],
    refuse: Callable[[KernelRequest], str | None],
    fingerprint: Callable[[KernelRequest], str],
    probe: Callable[[KernelRequest], None],
) -> KernelSpec:
    return KernelSpec(
        name=f"{op}_fp8_{kernel}",
        op=op,
        schemes=SCHEMES,
        targets=("cuda",),
        numerics=_WIDENED_NUMERICS if kernel == "packed_widening" else NUMERICS,
        refuse=refuse,
        bind=_bind(kernel),
        cost=_cost(kernel),
        sums="" if kernel == "packed_widening" else SUMS,
        layout="fp8-packed-pairs" if op.endswith("swiglu") else "fp8-packed",
        prepare=_prepare,
        tokens=tokens,
        probe=probe,
        fingerprint=fingerprint,
    )


def _bind(kernel: str) -> Callable[[Any, KernelRequest], Call]:
    def bind(prepared: Any, request: KernelRequest) -> Call:
        # They take any packed matrix.
        from vtensors_plugins.backends import cuda_nvfp4_binding

        return cuda_nvfp4_binding.BINDERS[kernel.removesuffix("_in_parts")](prepared, request)

    return bind


def _prepare(weights: Sequence[FP8], request: KernelRequest) -> PackedFP8:
    from vtensors_kernels.fp8.repack import pack_fp8

    return pack_fp8(weights, paired=request.op.endswith("swiglu"))


def _cost(kernel: str) -> Callable[[KernelRequest], float]:
    def cost(request: KernelRequest) -> float:
        from vtensors_kernels.fp8 import costs

        return costs.COSTS[kernel.removesuffix("_in_parts")](request)

    return cost


def _probe_stream(request: KernelRequest) -> None:
    from vtensors_kernels.fp8.stream import probe_fp8_stream

    probe_fp8_stream(request)


def _probe_segments(request: KernelRequest) -> None:
    from vtensors_kernels.fp8.stream import probe_fp8_segments
    from vtensors_plugins.backends.cuda_calls import require_norm

    require_norm(request)
    probe_fp8_segments(request)


def _probe_widening(request: KernelRequest) -> None:
    from vtensors_kernels.fp8.probes import probe_packed_widening

    op = request.op.removeprefix("norm_")
    probe_packed_widening(attrs.evolve(request, op="linear" if op == "linear_argmax" else op))


def _fingerprint_stream(request: KernelRequest) -> str:
    from vtensors_kernels.fp8.stream import fingerprint_fp8_stream

    return fingerprint_line(request, fingerprint_fp8_stream(request))


def _fingerprint_segments(request: KernelRequest) -> str:
    from vtensors_kernels.probing import fingerprint_of

    sources = ("sm90/linear_fp8_wgmma_segments.cu", "common/repack_fp8.cu", *STAGING_SOURCES)
    return fingerprint_line(request, fingerprint_of(request, *sources))


def _fingerprint_widening(request: KernelRequest) -> str:
    from vtensors_kernels.probing import fingerprint_of

    sources = ("repack_fp8.cu", "dequantize_packed_fp8.cu", "finish_widened_nvfp4.cu")
    return fingerprint_line(request, fingerprint_of(request, *(f"common/{name}" for name in sources)))


# ---- why not


def _refuse(request: KernelRequest) -> str | None:
    if request.shape is not None and request.shape[1] % 16:
        return f"needs K to be a multiple of 16, not {request.shape[1]}"
    if request.scheme == "fp8-block":
        for trait in sorted(request.traits):
            if trait.startswith("block") and (reason := _refuse_block(trait.removeprefix("block"))):
                return reason
        if not request.op.endswith("swiglu") and any(rows % _SCALE_ROWS for rows in request.parts[:-1]):
            return f"packs parts of a multiple of {_SCALE_ROWS} rows, not of {list(request.parts)}"
    return refusal(request)


def _refuse_segments(request: KernelRequest) -> str | None:
    if request.shape is not None:
        n, k = request.shape
        if -(-n // 16) * -(-k // 128) >= WGMMA_BLOCKS:
            return f"spans fewer than {WGMMA_BLOCKS} blocks of 16 x 128, not those of {n} x {k}"
    return _refuse(request) or norm_refusal(request)


def _refuse_block(size: str) -> str | None:
    rows, columns = (int(number) for number in size.split("x"))
    if rows % _SCALE_ROWS or columns % _SCALE_COLUMNS:
        accepted = f"multiples of {_SCALE_ROWS} rows and {_SCALE_COLUMNS} columns"
        return f"knows blocks of {accepted}, not of {rows} x {columns}"
    return None


def _refuse_stream(request: KernelRequest) -> str | None:
    if request.op.startswith("norm_") and "pre_scale" in request.traits:
        return "a norm and a pre-scale round x twice; the kernel does it once"
    if request.shape is not None and request.capability is not None:
        from vtensors_kernels.compiling.architectures import target_of
        from vtensors_kernels.fp8.packed import SCALES_OF
        from vtensors_kernels.nvfp4.stream_form import serves

        block_bytes = SCALES_OF[request.scheme].block_bytes
        if not serves(request.shape[1], target_of(request.capability), block_bytes):
            return f"a row of {request.shape[1]} columns does not fit into shared memory"
    return _refuse(request)
