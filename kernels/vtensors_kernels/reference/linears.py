"""Several weights over one x, their results side by side; with an RMSNorm in front where asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm


def linears(x: Tensor, weights: Sequence[Weight], activation: ActivationQuantizer | None = None) -> Tensor:
    """[M, N] in x's dtype: `linear` of each part, N the sum of their rows.

    x: [M, K] bfloat16, float16 or float32. weights: (N_i, K) each, in order. activation: as for `linear`, the
    same for all parts.
    """
    return torch.cat([linear(x, weight, activation) for weight in weights], dim=-1)


def norm_linears(
    x: Tensor,
    gain: Tensor,
    eps: float,
    weights: Sequence[Weight],
    activation: ActivationQuantizer | None = None,
) -> Tensor:
    """`linears` of x / rms(x) * gain. gain: [K] float32, with its + 1; the rest as for `linears`."""
    return linears(rms_norm(x, gain, eps, zero_centered=False), weights, activation)
