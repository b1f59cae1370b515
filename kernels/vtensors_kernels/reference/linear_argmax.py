"""The index of the largest logit, as greedy decoding takes it."""

from __future__ import annotations

from torch import Tensor

from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.linear import linear


def argmax(logits: Tensor) -> Tensor:
    """[M] int64: the index of the largest logit, the lowest among equal ones. logits: [M, V] model dtype."""
    return logits.argmax(-1)


def linear_argmax(x: Tensor, weight: Weight, activation: ActivationQuantizer | None = None) -> Tensor:
    """[M] int64: `argmax` of `linear`, whose result is rounded to x's dtype first. x: [M, K]. weight: (V, K)."""
    return argmax(linear(x, weight, activation))
