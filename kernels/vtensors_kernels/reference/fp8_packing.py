"""The packed FP8 layout (`cuda/include/fp8_packed.cuh`) in plain tensor operations, both ways, any device.

`pack_fp8_reference` is the twin of `fp8/repack.py`, byte for byte. `unpack_fp8_reference` reads a packed matrix back
into float32 in the order of the parts' own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtensors_formats import e4m3
from vtensors_kernels.fp8.packed import CODE_BYTES, PackedFP8, Scales
from vtensors_kernels.fp8.scales import FP8, SCALE_ROWS, block_scales, row_scale, scales_of
from vtensors_kernels.packed_tiles import STEP_COLUMNS, TILE_ROWS, column_steps
from vtensors_kernels.packing import check_parts
from vtensors_kernels.reference.nvfp4_packing import packed_order

# Where the eight bits of each of 4 codes (from bit 0; the sign is bit 7) go in a word.
_FIRST, _SECOND = (4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11)
_PLACES = (
    _FIRST,
    tuple(place + 16 for place in _FIRST),
    _SECOND,
    tuple(place + 16 for place in _SECOND),
)
# Exponent of a group's byte: value = e4m3 * 2^(byte - 247) * row_scale.
_GROUP_BIAS = 247


def pack_fp8_reference(weights: Sequence[FP8], *, paired: bool = False) -> PackedFP8:
    """What `pack_fp8` gives, on the device of the weights. Raises RequestError as it does."""
    check_parts(weights, paired=paired)
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    order = packed_order(n, paired=paired).to(weights[0].device)
    codes = _take(torch.cat([e4m3.as_bytes(part.codes) for part in weights]), order)
    has_bias = any(part.bias is not None for part in weights)
    pre_scale = weights[0].pre_scale
    return PackedFP8(
        blocks=torch.cat([_code_blocks(codes, k), block_scales(weights, paired=paired)], dim=-1).contiguous(),
        row_scale=_take(torch.cat([row_scale(part) for part in weights]), order),
        shape=(n, k),
        scales=scales_of(weights),
        paired=paired,
        bias=_take(torch.cat([_bias(part) for part in weights]), order) if has_bias else None,
        pre_scale=None if pre_scale is None else pre_scale.float(),
    )


def unpack_fp8_reference(packed: PackedFP8) -> Tensor:
    """float32 [N, K], rows as the parts had them, stacked: bit for bit `dequantize` of the parts."""
    n, k = packed.shape
    values = e4m3.decode(_codes_of(packed.blocks[:, :, :CODE_BYTES]).view(torch.float8_e4m3fn))
    behind = packed.blocks[:, :, CODE_BYTES:].contiguous()
    tiles, steps, _ = behind.shape
    match packed.scales:
        case Scales.ROWS:
            values = values * (packed.row_scale / 256.0).unsqueeze(-1)
        case Scales.STEPS:
            fours = behind.view(torch.float32).permute(0, 2, 1)
            of_rows = fours.repeat_interleave(SCALE_ROWS, dim=1).reshape(tiles * TILE_ROWS, steps)
            scale = of_rows * (packed.row_scale / 256.0).unsqueeze(-1)
            values = values * scale.repeat_interleave(STEP_COLUMNS, dim=1)
        case Scales.GROUPS:
            groups = behind.reshape(tiles, steps, 8, 4, 2).permute(0, 4, 2, 1, 3)
            exponent = groups.reshape(tiles * TILE_ROWS, steps * 4).to(torch.int64) - _GROUP_BIAS
            # Both factors are powers of two; in float64 neither their product nor the value's is rounded.
            scale = (exponent + 1023 << 52).view(torch.float64) * packed.row_scale.double().unsqueeze(-1)
            values = (values.double() * scale.repeat_interleave(32, dim=1)).float()
    order = packed_order(n, paired=packed.paired).to(values.device)
    out = torch.empty(n, k, device=values.device)
    out[order[order >= 0]] = values[order >= 0, :k]
    return out


def _take(values: Tensor, order: Tensor) -> Tensor:
    taken = values[order.clamp(min=0)]
    taken[order < 0] = 0
    return taken


def _code_blocks(codes: Tensor, k: int) -> Tensor:
    """[T, S, 2048] uint8. codes: uint8 [16 T, K] in packed order of rows."""
    tiles, steps = codes.shape[0] // TILE_ROWS, column_steps(k)
    fours = torch.nn.functional.pad(codes, (0, steps * STEP_COLUMNS - k)).to(torch.int32)
    fours = fours.reshape(-1, steps * 32, 4)
    data = torch.zeros(*fours.shape[:2], 4, dtype=torch.uint8, device=codes.device)
    for element, places in enumerate(_PLACES):
        for bit, place in enumerate(places):
            data[..., place // 8] |= ((fours[..., element] >> bit & 1) << place % 8).to(torch.uint8)
    # [T, half of the tile, row g, S, quarter c, chunk of 8 columns, bytes of two words]
    data = _swap(data.reshape(tiles, 2, 8, steps, 4, 4, 8))
    # Words 0 .. 3 of all lanes before words 4 .. 7: [T, S, half, pair of chunks, g, c, bytes]
    data = data.reshape(tiles, 2, 8, steps, 4, 2, 16).permute(0, 3, 1, 5, 2, 4, 6)
    return data.reshape(tiles, steps, CODE_BYTES)


def _codes_of(blocks: Tensor) -> Tensor:
    """uint8 [16 T, 128 S]: the codes of packed blocks without scales, [T, S, 2048]."""
    tiles, steps, _ = blocks.shape
    data = blocks.reshape(tiles, steps, 2, 2, 8, 4, 16).permute(0, 2, 4, 1, 5, 3, 6)
    data = _swap(data.reshape(tiles, 2, 8, steps, 4, 4, 8)).to(torch.int32).reshape(-1, steps * 32, 4)
    codes = torch.zeros(*data.shape[:2], 4, dtype=torch.int32, device=blocks.device)
    for element, places in enumerate(_PLACES):
        for bit, place in enumerate(places):
            codes[..., element] |= (data[..., place // 8] >> place % 8 & 1) << bit
    return codes.to(torch.uint8).reshape(tiles * TILE_ROWS, steps * STEP_COLUMNS)


def _swap(data: Tensor) -> Tensor:
    """Chunks 0 1 2 3 -> 1 0 3 2 of the upper two quarters. data: [..., quarter, chunk, byte]."""
    swapped = data.clone()
    swapped[..., 2:, :, :] = data[..., 2:, [1, 0, 3, 2], :]
    return swapped


def _bias(weight: FP8) -> Tensor:
    return torch.zeros(weight.shape[0], device=weight.device) if weight.bias is None else weight.bias.float()
