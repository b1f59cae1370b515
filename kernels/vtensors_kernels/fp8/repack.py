"""FP8 and MXFP8 weights as stored -> the packed layout, on a CUDA device; reference: `reference/fp8_packing.py`."""

from __future__ import annotations

from collections.abc import Sequence

from vtensors.errors import RequestError
from vtensors_kernels.alignment import aligned
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.fp8.packed import CODE_BYTES, PackedFP8
from vtensors_kernels.fp8.scales import FP8, block_scales, row_scale, scales_of
from vtensors_kernels.packing import (
    biases,
    check_parts,
    empty_blocks,
    first_rows,
    pre_scale_of,
    repack_part,
    row_values,
)

KERNEL = "common/repack_fp8.cu", "repack_fp8"
INSTANTIATIONS = (Instantiation(source=KERNEL[0], function=KERNEL[1]),)


def pack_fp8(weights: Sequence[FP8], *, paired: bool = False) -> PackedFP8:
    """The weights as one packed matrix: stacked by rows in order, or two of one shape interleaved by 8 rows.

    weights: on one CUDA device, of one K, a multiple of 16, all with scales of one kind: per matrix or row, per block
    (of 128 i columns and 4 j rows that begin at a multiple of 4), or E8M0 for 32 columns. A missing bias counts as
    zeros where another part has one.
    Errors: those of `check_parts`; RequestError for other scales or off a CUDA device; CompileError, LaunchError.
    """
    check_parts(weights, paired=paired)
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    if k % 16:
        raise RequestError("the packed layout needs whole groups of 16 columns", seen=f"K = {k}")
    scales = scales_of(weights)
    blocks = empty_blocks(n, k, scales.block_bytes, weights[0].device)
    blocks[:, :, CODE_BYTES:] = block_scales(weights, paired=paired)
    for part, first in zip(weights, first_rows(weights, paired=paired), strict=True):
        repack_part(
            KERNEL,
            (aligned(part.codes, 16),),
            part.shape,
            blocks,
            first,
            interleaved=paired,
            last=scales.block_bytes,
        )
    return PackedFP8(
        blocks=blocks,
        row_scale=row_values([row_scale(part) for part in weights], n, paired=paired),
        shape=(n, k),
        scales=scales,
        paired=paired,
        bias=biases(weights, n, paired=paired),
        pre_scale=pre_scale_of(weights),
    )
