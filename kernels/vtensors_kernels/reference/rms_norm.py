"""Root-mean-square norm, zero-centred or plain."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """x / rms(x) * gain, in x's dtype.

    x: [..., D]. weight: [D] float32. zero_centered: the gain is 1 + weight (Qwen3.5), else weight itself.
    The 1 is added in float32: 1 + 0.003 would be 1 in bfloat16. One rounding, at the end.
    """
    wide = x.to(torch.float32)
    gain = weight + 1.0 if zero_centered else weight
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)
