"""The packed NVFP4 layout (`cuda/include/nvfp4_packed.cuh`) in plain tensor operations, both ways, any device.

`pack_reference` is the twin of `nvfp4/repack.py`, byte for byte. `unpack_reference` reads a packed matrix back
into float32 in the order of the parts' own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtensors_formats import NVFP4Weight, e4m3
from vtensors_formats.groups import split_groups
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.packed_tiles import TILE_ROWS, column_steps, row_tiles
from vtensors_kernels.packing import check_parts

_GROUP = 16
# Where the four bits of each of 8 codes (m, e, e, s from bit 0) go in a word.
_PLACES = (
    (30, 7, 8, 15),
    (14, 23, 24, 31),
    (4, 5, 6, 13),
    (20, 21, 22, 29),
    (0, 1, 2, 9),
    (16, 17, 18, 25),
    (26, 27, 28, 3),
    (10, 11, 12, 19),
)
# E2M1 magnitudes by code without the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_reference(weights: Sequence[NVFP4Weight], *, paired: bool = False) -> PackedNVFP4:
    """What `pack` gives, on the device of the weights. Raises RequestError as `check_parts` does."""
    check_parts(weights, paired=paired)
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    order = packed_order(n, paired=paired).to(weights[0].device)
    codes, scales = (torch.cat(parts) for parts in zip(*map(_codes_and_scales, weights), strict=True))
    has_bias = any(part.bias is not None for part in weights)
    pre_scale = weights[0].pre_scale
    return PackedNVFP4(
        blocks=_blocks(_take(codes, order), _take(scales, order), k),
        row_scale=_take(torch.cat([_global_scale(part) * 256.0 for part in weights]), order),
        shape=(n, k),
        paired=paired,
        bias=_take(torch.cat([_bias(part) for part in weights]), order) if has_bias else None,
        pre_scale=None if pre_scale is None else pre_scale.float(),
    )


def unpack_reference(packed: PackedNVFP4) -> Tensor:
    """float32 [N, K], rows as the parts had them, stacked: e2m1 * (block scale * global scale).

    Bit for bit `NVFP4Weight.dequantize` where the global scale is a multiplier; a divisor was inverted and
    rounded once when it was packed.
    """
    n, k = packed.shape
    codes, scales = _codes_and_scales_of(packed.blocks)
    scales = scales * (packed.row_scale / 256.0).unsqueeze(-1)
    values = _decode(codes)
    split_groups(values, _GROUP).mul_(scales.unsqueeze(-1))
    order = packed_order(n, paired=packed.paired).to(values.device)
    out = torch.empty(n, k, device=values.device)
    out[order[order >= 0]] = values[order >= 0, :k]
    return out


def packed_order(n: int, *, paired: bool) -> Tensor:
    """[16 * ceil(N / 16)] int64: which of the N stacked rows lies at each packed row, -1 for padding."""
    rows = torch.arange(row_tiles(n) * TILE_ROWS)
    if not paired:
        return torch.where(rows < n, rows, -1)
    inner = rows // 16 * 8 + rows % 8
    return torch.where(inner < n // 2, inner + rows % 16 // 8 * (n // 2), -1)


def _take(values: Tensor, order: Tensor) -> Tensor:
    taken = values[order.clamp(min=0)]
    taken[order < 0] = 0
    return taken


def _codes_and_scales(weight: NVFP4Weight) -> tuple[Tensor, Tensor]:
    """codes [N, K] 0..15 as int32, zero magnitude under a zero scale; scale bytes [N, K / 16] of the layout."""
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).flatten(-2).to(torch.int32)
    stored = e4m3.as_bytes(weight.block_scale).to(torch.int32) & 0x7F
    stored = stored.repeat_interleave(weight.group // _GROUP, dim=-1)
    # x + 10 and mmm of m * 2^-9, m = 0..7.
    subnormal = torch.tensor([0, 8, 16, 20, 24, 26, 28, 30], dtype=torch.int32, device=stored.device)
    scales = torch.where(stored < 8, subnormal[stored.clamp(max=7)], stored + 24)
    zero = (scales == 0).repeat_interleave(_GROUP, dim=-1)
    return torch.where(zero, codes & 8, codes), scales


def _blocks(codes: Tensor, scales: Tensor, k: int) -> Tensor:
    """[T, S, 1152] uint8. codes: [16 T, K] int32; scales: [16 T, K / 16] int32, in packed order of rows."""
    tiles, steps = codes.shape[0] // TILE_ROWS, column_steps(k)
    codes = torch.nn.functional.pad(codes, (0, steps * 128 - k))
    scales = torch.nn.functional.pad(scales, (0, steps * 8 - k // _GROUP))
    eights = codes.reshape(-1, steps * 16, 8)
    data = torch.zeros(*eights.shape[:2], 4, dtype=torch.uint8, device=codes.device)
    for element, places in enumerate(_PLACES):
        for bit, place in enumerate(places):
            data[..., place // 8] |= ((eights[..., element] >> bit & 1) << place % 8).to(torch.uint8)
    # [T, half of the tile, row g, S, quarter c, word, bytes]
    data = _swap(data.reshape(tiles, 2, 8, steps, 4, 4, 4))
    data = data.permute(0, 3, 1, 2, 4, 5, 6).reshape(tiles, steps, 1024)
    grouped = scales.to(torch.uint8).reshape(tiles, 2, 8, steps, 4, 2)
    grouped = grouped.permute(0, 3, 2, 4, 1, 5).reshape(tiles, steps, 128)
    return torch.cat([data, grouped], dim=-1).contiguous()


def _codes_and_scales_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """codes [16 T, 128 S] int32 and float32 block scales [16 T, 8 S] of packed blocks."""
    tiles, steps, size = blocks.shape
    data = blocks[:, :, : size - 128].reshape(tiles, steps, 2, 8, 4, 4, 4).permute(0, 2, 3, 1, 4, 5, 6)
    data = _swap(data).to(torch.int32).reshape(tiles * TILE_ROWS, steps * 16, 4)
    codes = torch.zeros(*data.shape[:2], 8, dtype=torch.int32, device=blocks.device)
    for element, places in enumerate(_PLACES):
        for bit, place in enumerate(places):
            codes[..., element] |= (data[..., place // 8] >> place % 8 & 1) << bit
    grouped = blocks[:, :, size - 128 :].reshape(tiles, steps, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5)
    grouped = grouped.to(torch.float32).reshape(tiles * TILE_ROWS, steps * 8)
    exponent = torch.floor(grouped / 8)
    scales = torch.where(grouped == 0, 0.0, torch.exp2(exponent - 10) * (1 + (grouped - 8 * exponent) / 8))
    return codes.reshape(tiles * TILE_ROWS, steps * 128), scales


def _swap(data: Tensor) -> Tensor:
    """Words 0 1 2 3 -> 1 0 3 2 of the upper two quarters. data: [..., quarter, word, byte]."""
    swapped = data.clone()
    swapped[..., 2:, :, :] = data[..., 2:, [1, 0, 3, 2], :]
    return swapped


def _decode(codes: Tensor) -> Tensor:
    magnitudes = torch.tensor(_MAGNITUDES, device=codes.device)[codes & 7]
    return torch.where(codes >= 8, -magnitudes, magnitudes)


def _global_scale(weight: NVFP4Weight) -> Tensor:
    """[N] float32."""
    stored = weight.global_scale
    if stored is None:
        divisor = torch.ones(()) if weight.global_divisor is None else weight.global_divisor
        stored = (1.0 / divisor.double()).float()
    return stored.reshape(-1).expand(weight.shape[0])


def _bias(weight: NVFP4Weight) -> Tensor:
    return torch.zeros(weight.shape[0], device=weight.device) if weight.bias is None else weight.bias.float()
