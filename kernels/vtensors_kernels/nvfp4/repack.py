"""NVFP4 weights as stored -> the packed layout, on a CUDA device; reference: `reference/nvfp4_packing.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.alignment import aligned
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES, PackedNVFP4
from vtensors_kernels.packing import (
    biases,
    check_parts,
    empty_blocks,
    first_rows,
    pre_scale_of,
    repack_part,
    row_values,
)

KERNEL = "common/repack_nvfp4.cu", "repack_nvfp4"
INSTANTIATIONS = (Instantiation(source=KERNEL[0], function=KERNEL[1]),)


def pack(weights: Sequence[NVFP4Weight], *, paired: bool = False) -> PackedNVFP4:
    """The weights as one packed matrix: stacked by rows in order, or two of one shape interleaved by 8 rows.

    weights: on one CUDA device, of one K; groups of 16 or 32, global scale or divisor, per tensor or per row,
    each as it is. A missing bias counts as zeros where another part has one.
    Errors: those of `check_parts`; RequestError off a CUDA device; CompileError, LaunchError.
    """
    check_parts(weights, paired=paired)
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    blocks = empty_blocks(n, k, BLOCK_BYTES, weights[0].device)
    for part, first in zip(weights, first_rows(weights, paired=paired), strict=True):
        repack_part(
            KERNEL,
            (aligned(part.codes, 8), aligned(part.block_scale, 1)),
            part.shape,
            blocks,
            first,
            interleaved=paired,
            last=part.group,
        )
    return PackedNVFP4(
        blocks=blocks,
        row_scale=row_values([row_scale(part) for part in weights], n, paired=paired),
        shape=(n, k),
        paired=paired,
        bias=biases(weights, n, paired=paired),
        pre_scale=pre_scale_of(weights),
    )


def row_scale(weight: NVFP4Weight) -> Tensor:
    """[N] float32: 256 times each row's global scale, as `multiplier` has it."""
    return (multiplier(weight).float() * 256.0).reshape(-1).expand(weight.shape[0])


def multiplier(weight: NVFP4Weight) -> Tensor:
    """[] or [N, 1] float32: the global scale; of a divisor 1 / divisor in float64, rounded once.

    That is within half an ULP of what dividing would give. Raises RequestError for a weight without either.
    """
    if weight.global_scale is not None:
        return weight.global_scale
    if weight.global_divisor is None:
        raise RequestError("an NVFP4 weight without a global scale")
    return (1.0 / weight.global_divisor.double()).float()
