"""Encoders to FP8: scale = amax / 448 in float32 per matrix, row or block; code = e4m3(clamp(w / scale,
+-448)).

A matrix, row or block of zeros gets scale 1, so that no writer's 0 / 0 turns into NaN codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import e4m3
from vtensors_formats.arithmetic import divide
from vtensors_formats.fp8 import FP8Weight


def quantize_fp8_tensor(weight: Tensor) -> FP8Weight:
    """`fp8-tensor` of [N, K] float. Raises RequestError on another rank or values that are not finite."""
    values = _checked(weight)
    scale = _scale(values.abs().max())
    return FP8Weight(codes=e4m3.encode(values / scale), scale=scale)


def quantize_fp8_row(weight: Tensor) -> FP8Weight:
    """`fp8-row` of [N, K] float. Raises RequestError on another rank or values that are not finite."""
    values = _checked(weight)
    scale = _scale(values.abs().amax(1, keepdim=True))
    return FP8Weight(codes=e4m3.encode(values / scale), scale=scale)


def quantize_fp8_block(weight: Tensor, block: tuple[int, int] = (128, 128)) -> FP8Weight:
    """`fp8-block` of [N, K] float; blocks at the edges may be partial. Errors as `quantize_fp8_row`."""
    values = _checked(weight)
    n, k = values.shape
    padded = torch.nn.functional.pad(values, (0, -k % block[1], 0, -n % block[0]))
    rows, columns = padded.shape
    blocks = padded.view(rows // block[0], block[0], columns // block[1], block[1])
    scale = _scale(blocks.abs().amax((1, 3)))
    codes = e4m3.encode(blocks / scale[:, None, :, None])
    trimmed = e4m3.as_bytes(codes).reshape(padded.shape)[:n, :k].contiguous().view(torch.float8_e4m3fn)
    return FP8Weight(codes=trimmed, scale=scale, block=block)


def _checked(weight: Tensor) -> Tensor:
    if weight.ndim != 2:
        raise RequestError(
            "cannot be quantized to FP8", seen=f"shape {list(weight.shape)}", accepted="[N, K]"
        )
    values = weight.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise RequestError("cannot be quantized to FP8", seen="NaN or infinity", accepted="finite values")
    return values


def _scale(amax: Tensor) -> Tensor:
    scale = divide(amax, e4m3.MAX)
    return torch.where(scale == 0, 1.0, scale)
