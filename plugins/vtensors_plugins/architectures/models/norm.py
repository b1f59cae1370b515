"""Norms with their weight bound."""

from __future__ import annotations

import attrs
from torch import Tensor

from vtensors_kernels.reference.rms_norm import rms_norm


@attrs.frozen
class RMSNorm:
    """x / rms(x) * gain over the last dimension. weight: [D] float32; zero_centered: it holds gain - 1."""

    weight: Tensor
    eps: float
    zero_centered: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x [..., D]."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)
