"""Views of a tensor's last dimension as scale groups."""

from __future__ import annotations

import torch
from torch import Tensor


def split_groups(x: Tensor, size: int) -> Tensor:
    """[..., K // size, size] view of [..., K], K a multiple of size."""
    return x.view(*x.shape[:-1], x.shape[-1] // size, size)


def padded_groups(x: Tensor, size: int) -> Tensor:
    """float32 [..., ceil(K / size), size] of [..., K] float, the last group filled up with zeros."""
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -x.shape[-1] % size))
    return split_groups(padded.contiguous(), size)


def join_groups(groups: Tensor, k: int) -> Tensor:
    """[..., k] of groups [..., G, size], the filling cut off."""
    return groups.flatten(-2)[..., :k]
