"""silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in gate's dtype; gate, up: [M, N]. float32 inside, one rounding."""
    return (F.silu(gate.to(torch.float32)) * up.to(torch.float32)).to(gate.dtype)
