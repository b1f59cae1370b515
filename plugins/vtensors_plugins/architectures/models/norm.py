"""Norms with their weight bound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from vtensors_kernels.reference.rms_norm import rms_norm

BindNorm = Callable[[Tensor, float], Callable[[Tensor], Tensor]]
"""gain [D] float32, eps -> the norm of x [..., D]."""
_log = logging.getLogger("vtensors")
# Trained zero-centered weights scatter around 0; plain gains around 1.
_LOOKS_PLAIN = (0.9, 1.1)


@attrs.frozen(eq=False)
class RMSNorm:
    """x / rms(x) * gain over the last dimension. weight: [D] float32; zero_centered: it holds gain - 1.

    gain: [D] float32, what x is multiplied by; made once. bind: makes the kernel, None = the reference computes.
    """

    weight: Tensor
    eps: float
    zero_centered: bool
    bind: BindNorm | None = attrs.field(default=None, repr=False)
    gain: Tensor = attrs.field(init=False)
    kernel: Callable[[Tensor], Tensor] | None = attrs.field(init=False, repr=False)

    @gain.default
    def _gain(self) -> Tensor:
        return self.weight + 1.0 if self.zero_centered else self.weight

    @kernel.default
    def _kernel(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.bind is None else self.bind(self.gain, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x [..., D]."""
        if self.kernel is not None:
            return self.kernel(x)
        return rms_norm(x, self.gain, self.eps, zero_centered=False)


def warn_of_plain_gains(weights: Sequence[Tensor]) -> None:
    """Says so where zero-centered norms look as if 1 had been added to them already: their gain would be 2.

    weights: [D] float32 each; without data (on the `meta` device) nothing is said. The median of their means
    decides, so that a few odd layers do not.
    """
    if not weights or weights[0].is_meta:
        return
    middle = float(torch.stack([weight.mean() for weight in weights]).median())
    if _LOOKS_PLAIN[0] <= middle <= _LOOKS_PLAIN[1]:
        _log.warning(
            "the norm weights have mean %.2f, and this family's norms multiply by 1 + weight: they look as if a "
            "converter had added the 1 already, which gives noise; use the publisher's own checkpoint",
            middle,
        )
