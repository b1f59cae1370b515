"""Rotary position embedding of the first part of each head, halves paired (i, i + R/2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, R / 2] float32 each. positions: [T] int64. inverse_frequencies: [R / 2] float32."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    return angles.cos(), angles.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] with its first R dimensions turned; same dtype. cos, sin: [T, R / 2] float32.

    For text the three position rows of an interleaved mrope are equal, which makes it this plain rotation.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].to(torch.float32), x[..., half : 2 * half].to(torch.float32)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)
