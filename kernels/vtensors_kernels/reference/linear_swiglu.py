"""silu(gate) * up of two weights over one x; with an RMSNorm in front where asked."""

from __future__ import annotations

from torch import Tensor

from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu


def linear_swiglu(
    x: Tensor, gate: Weight, up: Weight, activation: ActivationQuantizer | None = None
) -> Tensor:
    """[M, F] in x's dtype. x: [M, K]. gate, up: (F, K). activation: as for `linear`, the same for both.

    Gate and up are rounded to x's dtype before they are multiplied.
    """
    return swiglu(linear(x, gate, activation), linear(x, up, activation))


def norm_linear_swiglu(
    x: Tensor,
    gain: Tensor,
    eps: float,
    gate: Weight,
    up: Weight,
    activation: ActivationQuantizer | None = None,
) -> Tensor:
    """`linear_swiglu` of x / rms(x) * gain. gain: [K] float32, with its + 1."""
    return linear_swiglu(rms_norm(x, gain, eps, zero_centered=False), gate, up, activation)
