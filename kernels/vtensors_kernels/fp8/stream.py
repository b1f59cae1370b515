"""What kernels of packed FP8 matrices are compiled in, and the self-tests of `linear_fp8_stream` and of
`linear_fp8_wgmma_segments`.

`nvfp4/stream.py`, `nvfp4/wgmma_segments.py` and `nvfp4/packed_widening.py` launch them for a `PackedFP8`.

Forms and variants are compiled ahead as those of NVFP4 for scales per row, the plain ones for scales within blocks.
"""

from __future__ import annotations

import torch

from vtensors.errors import RequestError
from vtensors.records import KernelRequest
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.fp8.packed import MAX_TOKENS, SCALES_OF, PackedFP8, Scales
from vtensors_kernels.fp8.probes import check_packed, random_fp8, reference, repeat_rows
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.scales import SCALE_ROWS
from vtensors_kernels.nvfp4 import wgmma_segments
from vtensors_kernels.nvfp4.stream_launches import instantiations
from vtensors_kernels.nvfp4.stream_probe import ProbeWeights, fingerprint_stream, probe_stream

INSTANTIATIONS = (
    *(found for scales in Scales for found in instantiations(scales.format, few=scales is not Scales.ROWS)),
    *(
        found
        for scales in Scales
        if scales.format.segments is not None
        for found in wgmma_segments.instantiations(scales.format)
    ),
    *(
        Instantiation(
            source=scales.format.widen[0],
            function=scales.format.widen[1],
            defines={"VT_F16": f16, **dict(scales.format.defines)},
        )
        for scales in Scales
        for f16 in (0, 1)
    ),
)


def probe_fp8_stream(request: KernelRequest) -> None:
    """`probe_stream` on FP8 or MXFP8 weights of the request's scheme, their repack held against its reference."""
    _check_repack(request)
    probe_stream(request, _weights(request))


def probe_fp8_segments(request: KernelRequest) -> None:
    """`probe_wgmma_segments` on weights of the request's scheme, their repack held against its reference."""
    _check_repack(request)
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))

    def matrix(rows: int, paired: bool) -> PackedFP8:
        count = 2 if paired else 1
        return pack_fp8([random_fp8(request, rows // count, seed=i) for i in range(count)], paired=paired)

    op = request.op.removeprefix("norm_")
    wgmma_segments.probe_wgmma_segments(
        request.shape,
        getattr(torch, request.dtype),
        op if op in ("linear_add", "linear_swiglu") else "linear",
        torch.device(request.device),
        (request.tokens[0], request.tokens[1] or MAX_TOKENS),
        matrix,
    )


def fingerprint_fp8_stream(request: KernelRequest) -> str:
    """What a verdict depends on: as `fingerprint_stream`."""
    return fingerprint_stream(request, SCALES_OF[request.scheme].format)


def _check_repack(request: KernelRequest) -> None:
    """Two parts, or gate and up, with tails."""
    paired = request.op.endswith("swiglu")
    rows = (43, 43) if paired else (40, 43)
    parts = [random_fp8(request, n, seed=i) for i, n in enumerate(rows)]
    check_packed(pack_fp8(parts, paired=paired), parts)


def _weights(request: KernelRequest) -> ProbeWeights:
    return ProbeWeights(
        format=SCALES_OF[request.scheme].format,
        random=lambda asked, rows, seed, factor: random_fp8(asked, rows, seed=seed, scale_factor=factor),
        repeat=repeat_rows,
        pack=lambda weights, paired: pack_fp8(weights, paired=paired),
        linear=reference,
        rows=SCALE_ROWS if request.scheme == "fp8-block" else 1,
    )
