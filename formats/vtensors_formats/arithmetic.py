"""Arithmetic that gives the same bits on every device."""

from __future__ import annotations

from torch import Tensor


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded, same shape and dtype. x: float32.

    torch multiplies a CUDA tensor by the reciprocal when the divisor is a Python number or a scalar on the
    CPU, and the result can be off by one unit in the last place. A divisor on x's own device is divided by.
    """
    return x / x.new_full((), number)
