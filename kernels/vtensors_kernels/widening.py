"""Linears on CUDA that widen a quantized weight to 16 bits, exactly, and leave the product to cuBLAS.

The codes (times their block scales) are exact in bfloat16 and float16; what is left of the scale multiplies
the float32 sums: a scalar as cuBLAS's alpha, one value per row after a float32 product. One scratch matrix per
call, of at most 512 MiB, comes from torch's allocator: memory holds the weight as stored plus that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_kernels.cublas_products import float32_product, scaled_product
from vtensors_kernels.nvfp4.repack import multiplier
from vtensors_kernels.wideners import HALVES, FP8Widener, NVFP4Widener

LinearCall = Callable[[Tensor], Tensor]
Part = Callable[[Tensor], Tensor]
W = TypeVar("W", NVFP4Weight, FP8Weight)
# The widened rows of one product: a layer of a 27B fits, a head of 248,320 rows is cut.
SCRATCH_BYTES = 512 << 20


def bind_nvfp4(weight: NVFP4Weight) -> LinearCall:
    """call(x [M, K] bf16 or f16) -> [M, N]: e2m1 * block scale by kernel, global scale behind the sums.

    Groups of 16 or 32; RequestError for others.
    """

    def part(rows: NVFP4Weight) -> Part:
        makers = {
            dtype: NVFP4Widener(rows.codes.contiguous(), rows.block_scale.contiguous(), dtype)
            for dtype in HALVES
        }

        def widen(dtype: torch.dtype) -> Tensor:
            return makers[dtype](torch.empty(rows.shape, dtype=dtype, device=rows.device))

        return _part(widen, multiplier(rows))

    return _linear(weight, part)


def bind_fp8(weight: FP8Weight) -> LinearCall:
    """call(x [M, K] bf16 or f16) -> [M, N] for a scale per tensor or per row; the codes are exact in 16 bits.

    Raises RequestError for block scales, which do not factor out of the sums.
    """
    if weight.block is not None:
        raise RequestError(
            "block scales do not factor out", seen=weight.scheme, accepted="fp8-tensor, fp8-row"
        )

    def part(rows: FP8Weight) -> Part:
        if rows.codes.numel() % 16:
            return _part(rows.codes.to, rows.scale_float32())
        makers = {dtype: FP8Widener(rows.codes.contiguous(), dtype) for dtype in HALVES}

        def widen(dtype: torch.dtype) -> Tensor:
            return makers[dtype](torch.empty(rows.shape, dtype=dtype, device=rows.device))

        return _part(widen, rows.scale_float32())

    return _linear(weight, part)


def _part(widen: Callable[[torch.dtype], Tensor], scale: Tensor) -> Part:
    """x -> x @ (widened rows).T * scale, rounded once to x's dtype."""
    if scale.numel() == 1:
        alpha = float(scale)
        return lambda x: scaled_product(x, widen(x.dtype), alpha)
    rows = scale.reshape(1, -1)
    return lambda x: (float32_product(x, widen(x.dtype)) * rows).to(x.dtype)


def _linear(weight: W, part: Callable[[W], Part]) -> LinearCall:
    step = max(1, SCRATCH_BYTES // (2 * weight.shape[1]))
    starts = range(0, weight.shape[0], step)
    parts = [part(weight.rows(start, min(start + step, weight.shape[0]))) for start in starts]
    bias, pre_scale = weight.bias, weight.pre_scale

    def call(x: Tensor) -> Tensor:
        if x.dtype not in HALVES:
            raise RequestError(
                "this kernel computes in 16 bits", seen=str(x.dtype), accepted="bfloat16, float16"
            )
        if pre_scale is not None:
            x = (x.float() * pre_scale.float()).to(x.dtype)
        out = parts[0](x) if len(parts) == 1 else torch.cat([rows(x) for rows in parts], dim=-1)
        return out if bias is None else (out.float() + bias.float()).to(x.dtype)

    return call
