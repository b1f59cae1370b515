"""Codes and scales of NVFP4 activations in the layouts that products read: what `quantize_nvfp4` has to write."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors_formats import e2m1, e4m3
from vtensors_formats.groups import join_groups, split_groups

_TILE_ROWS, _TILE_COLUMNS = 128, 4


def widened(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, K] code * scale, exact in bfloat16 and float16.

    codes: [M, K / 2] uint8, low nibble = even k. scale: [M, K / 16] float8_e4m3fn.
    """
    groups = split_groups(e2m1.decode(codes), 16) * e4m3.decode(scale).unsqueeze(-1)
    return join_groups(groups, 2 * codes.shape[-1]).to(dtype)


def tiled_scales(scale: Tensor) -> Tensor:
    """[128 * ceil(M / 128), 4 * ceil(G / 4)] float8_e4m3fn in tiles of 128 rows x 4 groups, zero for padding.

    scale: [M, G] float8_e4m3fn. A tile has 512 bytes, tiles lie by rows; the scale of row r and group g is at
    r % 32 * 16 + r % 128 / 32 * 4 + g % 4 of its tile (cuBLAS 13, 1D block scaling factors layout).
    """
    rows, groups = (
        -(-size // to) * to for size, to in zip(scale.shape, (_TILE_ROWS, _TILE_COLUMNS), strict=True)
    )
    full = torch.zeros(rows, groups, dtype=torch.uint8, device=scale.device)
    full[: scale.shape[0], : scale.shape[1]] = e4m3.as_bytes(scale)
    tiles = full.view(rows // 128, 4, 32, groups // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(rows, groups).view(torch.float8_e4m3fn)


def fragments(codes: Tensor, scale: Tensor) -> Tensor:
    """[ceil(M / 8), ceil(K / 128), 576] uint8: column operands of mma.m16n8k64, zero for padding.

    codes: [M, K / 2] uint8. scale: [M, K / 16] float8_e4m3fn. In a block of 8 tokens t and 128 columns, lane
    4 t + c has 16 bytes: for s and h in (0, 0), (0, 1), (1, 0), (1, 1) the 8 codes from k = 64 s + 32 h + 8 c on.
    Behind them the 8 scales of each token.
    """
    tiles, steps = -(-codes.shape[0] // 8), -(-codes.shape[1] // 64)
    words = _padded(codes, 8 * tiles, 64 * steps).view(tiles, 8, steps, 2, 2, 4, 4)
    operands = words.permute(0, 2, 1, 5, 3, 4, 6).reshape(tiles, steps, 512)
    scales = _padded(e4m3.as_bytes(scale), 8 * tiles, 8 * steps).view(tiles, 8, steps, 8).transpose(1, 2)
    return torch.cat([operands, scales.reshape(tiles, steps, 64)], dim=-1)


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    full = torch.zeros(rows, columns, dtype=torch.uint8, device=values.device)
    full[: values.shape[0], : values.shape[1]] = values
    return full
