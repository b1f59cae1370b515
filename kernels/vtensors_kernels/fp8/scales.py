"""Scales of FP8 and MXFP8 weights as the packed layout holds them, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import FP8Weight, MXFP8Weight, e8m0
from vtensors_kernels.fp8.packed import Scales
from vtensors_kernels.packed_tiles import STEP_COLUMNS, TILE_ROWS, column_steps, row_tiles
from vtensors_kernels.reference.nvfp4_packing import packed_order

FP8 = FP8Weight | MXFP8Weight
# Rows that share a step's scale in a block.
SCALE_ROWS = 4
# What a group's byte of a row's largest exponent becomes; 2^7 is left of it in the operands.
LARGEST_GROUP_BYTE, _LEFT = 254, 7


def scales_of(weights: Sequence[FP8]) -> Scales:
    """How weights of one scheme are packed. Raises RequestError where kinds of scales differ."""
    kinds = {_kind(weight) for weight in weights}
    if len(kinds) != 1:
        seen = ", ".join(weight.scheme for weight in weights)
        raise RequestError("parts of one matrix have one kind of scales", seen=seen)
    return kinds.pop()


def row_scale(weight: FP8) -> Tensor:
    """[N] float32 in the order of the weight's rows: what `PackedFP8.row_scale` holds of them."""
    if isinstance(weight, MXFP8Weight):
        return e8m0.decode(_largest(weight)) * 2.0**-_LEFT
    if weight.block is not None:
        return (_unit(weight) * 256.0).expand(weight.shape[0])
    return (weight.scale_float32() * 256.0).reshape(-1).expand(weight.shape[0])


def block_scales(weights: Sequence[FP8], *, paired: bool) -> Tensor:
    """[ceil(N / 16), ceil(K / 128), bytes] uint8: what a block holds behind its codes.

    Raises RequestError for blocks of rows or columns that the layout has no place for.
    """
    n, k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    order = packed_order(n, paired=paired).to(weights[0].device)
    tiles, steps = row_tiles(n), column_steps(k)
    match scales_of(weights):
        case Scales.ROWS:
            return torch.empty(tiles, steps, 0, dtype=torch.uint8, device=order.device)
        case Scales.STEPS:
            fours = _step_scales(weights, order).reshape(tiles, TILE_ROWS // SCALE_ROWS, steps)
            return fours.permute(0, 2, 1).contiguous().view(torch.uint8)
        case Scales.GROUPS:
            groups = torch.cat(
                [_group_bytes(weight) for weight in weights if isinstance(weight, MXFP8Weight)]
            )
            groups = torch.nn.functional.pad(groups, (0, steps * 4 - groups.shape[1]))[order.clamp(min=0)]
            # [T, half of the tile, row g, S, quarter c] -> [T, S, g, c, half]
            lanes = groups.reshape(tiles, 2, 8, steps, 4).permute(0, 3, 2, 4, 1)
            return lanes.reshape(tiles, steps, 64).contiguous()


def _kind(weight: FP8) -> Scales:
    if isinstance(weight, MXFP8Weight):
        return Scales.GROUPS
    return Scales.ROWS if weight.block is None else Scales.STEPS


def _step_scales(weights: Sequence[FP8], order: Tensor) -> Tensor:
    """float32 [packed rows / 4, S] in packed order of rows."""
    found: list[Tensor] = []
    places: list[Tensor] = []
    first = 0
    for weight in weights:
        if not isinstance(weight, FP8Weight) or weight.block is None:
            raise RequestError("no scales of blocks", seen=weight.scheme)
        height, width = weight.block
        if width % STEP_COLUMNS:
            raise RequestError(
                "the packed layout has a scale for 128 columns",
                seen=f"blocks of {height} x {width}",
                accepted=f"columns a multiple of {STEP_COLUMNS}",
            )
        columns = torch.arange(column_steps(weight.shape[1]), device=order.device) * STEP_COLUMNS // width
        found.append((weight.scale_float32() / _unit(weight))[:, columns])
        rows = torch.arange(weight.shape[0], device=order.device)
        places.append((rows + weight.row_offset) // height + first)
        first += weight.scale.shape[0]
    scales = torch.cat(found)
    of_rows = torch.where(order < 0, -1, torch.cat(places)[order.clamp(min=0)]).reshape(-1, SCALE_ROWS)
    largest = of_rows.amax(1, keepdim=True)
    if bool(((of_rows != largest) & (of_rows >= 0)).any()):
        raise RequestError(
            f"the packed layout has a scale for {SCALE_ROWS} rows",
            seen=f"blocks of {[w.block for w in weights if isinstance(w, FP8Weight)]} that begin elsewhere",
            accepted=f"blocks and parts of multiples of {SCALE_ROWS} rows",
        )
    taken = scales[largest[:, 0].clamp(min=0)]
    return torch.where(largest < 0, 0.0, taken)


def _unit(weight: FP8Weight) -> Tensor:
    """float32 []: the power of two at or below the largest scale, within 2^-126 .. 2^119; 1 where all are zero."""
    largest = weight.scale_float32().amax()
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1, 0).clamp(-126, 119)
    # Its bits: a power by exp2 may be rounded.
    return (exponent + 127 << 23).to(torch.int32).view(torch.float32)


def _largest(weight: MXFP8Weight) -> Tensor:
    """[N] uint8: each row's largest byte."""
    return e8m0.as_bytes(weight.scale).amax(1)


def _group_bytes(weight: MXFP8Weight) -> Tensor:
    """uint8 [N, K / 32]: 254 at each row's largest scale, one less for each power of two below it, not below 0."""
    stored = e8m0.as_bytes(weight.scale).to(torch.int16)
    below = _largest(weight).to(torch.int16).unsqueeze(1) - stored
    return (LARGEST_GROUP_BYTE - below).clamp_(min=0).to(torch.uint8)
