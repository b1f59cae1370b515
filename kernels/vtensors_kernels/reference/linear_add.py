"""A linear whose result is added to the residual stream."""

from __future__ import annotations

from torch import Tensor

from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.linear import linear


def add(residual: Tensor, y: Tensor) -> Tensor:
    """residual + y, [M, N] each, in residual's dtype; one rounding."""
    return residual + y


def linear_add(
    x: Tensor, residual: Tensor, weight: Weight, activation: ActivationQuantizer | None = None
) -> Tensor:
    """residual + linear(x), [M, N] in x's dtype. x: [M, K]. residual: [M, N]. weight: (N, K).

    The linear's result is rounded to x's dtype before it is added.
    """
    return add(residual, linear(x, weight, activation))
