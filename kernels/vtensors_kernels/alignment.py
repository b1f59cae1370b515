"""Tensors at addresses that kernels can read from."""

from __future__ import annotations

from torch import Tensor


def aligned(tensor: Tensor, alignment: int) -> Tensor:
    """The tensor contiguous and at a multiple of alignment bytes, copied only where it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % alignment else tensor
