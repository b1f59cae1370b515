"""Root-mean-square norm followed by a silu gate, as the delta net's output uses it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate), in the gate's dtype; the norm comes first, the weight is plain.

    x: [..., D] float. gate: [..., D] model dtype. weight: [D] float32. float32 inside, one rounding.
    """
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (normed * F.silu(gate.to(torch.float32))).to(gate.dtype)
