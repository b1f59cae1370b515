"""NVFP4 weights as row operands of block-scaled tensor cores (mma.m16n8k64): the packed layout and how it is made."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight, e4m3
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.nvfp4.quantize_activations import stored_global
from vtensors_kernels.packed_matrix import bytes_of
from vtensors_kernels.packed_tiles import TILE_ROWS, column_steps, row_tiles
from vtensors_kernels.packing import biases, check_parts, interleaved, pre_scale_of, row_values

LAYOUT, PAIRED_LAYOUT = "nvfp4-block-scaled", "nvfp4-block-scaled-pairs"
BLOCK_BYTES = 1152


@attrs.frozen(kw_only=True, eq=False)
class BlockScaledNVFP4:
    """One NVFP4 matrix that is multiplied with NVFP4 activations.

    blocks: [ceil(N / 16), ceil(K / 128), 1152] uint8, as `cuda/sm120/linear_nvfp4_w4a4.cu` says; padding is zero.
    row_scale: [16 * ceil(N / 16)] float32, the product of both global scales, in order of the rows.
    shape, paired, bias: as `PackedNVFP4` has them. pre_scale: [K] float32, multiplies x before it is quantized.
    activation: of the input.
    """

    blocks: Tensor
    row_scale: Tensor
    shape: tuple[int, int]
    activation: FP4Activation
    paired: bool = False
    bias: Tensor | None = None
    pre_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return bytes_of(self.blocks, self.row_scale, self.bias, self.pre_scale)


def pack_block_scaled(weights: Sequence[NVFP4Weight], *, paired: bool = False) -> BlockScaledNVFP4:
    """The weights as one matrix, on the device where they are: stacked in order, or two interleaved by 8 rows.

    Errors: those of `check_parts` and `activation_of`.
    """
    check_parts(weights, paired=paired)
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    codes, scales = stacked(weights, paired=paired)
    return BlockScaledNVFP4(
        blocks=operand_blocks(codes, scales),
        row_scale=row_values([both_global_scales(part) for part in weights], n, paired=paired),
        shape=(n, k),
        activation=activation_of(weights),
        paired=paired,
        bias=biases(weights, n, paired=paired),
        pre_scale=pre_scale_of(weights),
    )


def activation_of(weights: Sequence[NVFP4Weight]) -> FP4Activation:
    """The quantizer of the input, one for all parts.

    Raises RequestError where a part has another one, or none of 4 bits.
    """
    found = [part.activation for part in weights]
    kinds = [a for a in found if isinstance(a, FP4Activation)]
    if len(kinds) < len(found):
        raise RequestError("cannot run fp4 activations", seen="a weight without a 4-bit input scale")
    first = kinds[0]
    for other in kinds[1:]:
        if (first.global_scale is None) != (other.global_scale is None) or not torch.equal(
            stored_global(first), stored_global(other)
        ):
            raise RequestError(
                "parts of one matrix share the input, so they need one input scale",
                seen="differing input scales",
                fix="pack the parts one by one",
            )
    return first


def both_global_scales(weight: NVFP4Weight) -> Tensor:
    """[N] float32: each row's global scale times that of the activation; divisors divide. Rounded once."""
    activation = activation_of([weight])
    scale = stored_global(activation).double()
    scale = 1.0 / scale if activation.global_scale is None else scale
    if weight.global_scale is not None:
        scale = scale * weight.global_scale.double()
    elif weight.global_divisor is not None:
        scale = scale / weight.global_divisor.double()
    return scale.float().reshape(-1).expand(weight.shape[0])


def stacked(weights: Sequence[NVFP4Weight], *, paired: bool) -> tuple[Tensor, Tensor]:
    """Codes [N', K / 2] uint8 and scales [N', K / 16] uint8 of all parts: stacked, or interleaved by 8 rows.

    N' is N, in pairs with each part padded to a multiple of 8 rows. Groups of 32 have their scale twice; a scale of
    -0 becomes 0.
    """
    codes = [part.codes for part in weights]
    scales = [
        (e4m3.as_bytes(part.block_scale) & 0x7F).repeat_interleave(part.group // 16, dim=1)
        for part in weights
    ]
    if not paired:
        return torch.cat(codes), torch.cat(scales)
    return interleaved(codes), interleaved(scales)


def operand_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """[ceil(N / 16), ceil(K / 128), 1152] uint8. codes: [N, K / 2] uint8; scales: [N, K / 16] uint8 E4M3."""
    tiles, steps = row_tiles(codes.shape[0]), column_steps(2 * codes.shape[1])
    rows = tiles * TILE_ROWS
    # Words of 8 codes by [tile, half, g, step, s, h, c].
    words = _padded(codes, rows, 64 * steps).view(torch.int32).view(tiles, 2, 8, steps, 2, 2, 4)
    operands = words.permute(0, 3, 4, 2, 6, 5, 1).contiguous().view(torch.uint8).view(tiles, steps, 1024)
    by_row = _padded(scales, rows, 8 * steps).view(tiles, 2, 8, steps, 8).permute(0, 3, 2, 1, 4)
    return torch.cat([operands, by_row.reshape(tiles, steps, 128)], dim=-1)


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, columns], zeros where values has nothing."""
    return torch.nn.functional.pad(
        values, (0, columns - values.shape[1], 0, rows - values.shape[0])
    ).contiguous()
