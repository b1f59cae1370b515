"""Scales that look inverted: what a reader of the other sense makes of an ordinary checkpoint."""

from __future__ import annotations

import logging

import attrs

from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_formats.weight import Weight

_log = logging.getLogger("vtensors")
# A multiplier is amax / 2688 (NVFP4) or amax / 448 (FP8): above 1 the largest weight is 448 at least.
_MOST_MULTIPLIER = 1.0
# An inversion shows in every weight; each look costs a device a moment.
_LOOKS = 16


@attrs.define
class ScaleDoubts:
    """Says once that scales look inverted. Only the first weights of a model are looked at."""

    _left: int = attrs.field(default=_LOOKS, init=False)

    def look(self, name: str, weight: Weight) -> None:
        """Warn if all codes of the weight are multiplied by more than 1. name: for the message."""
        if self._left <= 0 or not isinstance(weight, NVFP4Weight | FP8Weight) or weight.stored()[0].is_meta:
            return
        self._left -= 1
        multiplier = _multiplier(weight)
        if multiplier > _MOST_MULTIPLIER:
            self._left = 0
            _log.warning(
                "%s: %.3g multiplies all of its codes, which no calibration gives: a divisor stored as a multiplier, "
                "or the reverse, gives wrong weights; `vtensors verify` lists every such scale",
                name,
                multiplier,
            )


def _multiplier(weight: NVFP4Weight | FP8Weight) -> float:
    """The smallest number that multiplies any code but for block scales of NVFP4; 0.0 for an empty weight."""
    if isinstance(weight, FP8Weight):
        scale = weight.scale_float32()
        return float(scale.min()) if scale.numel() else 0.0
    if weight.global_scale is not None:
        return float(weight.global_scale.min()) if weight.global_scale.numel() else 0.0
    divisor = weight.global_divisor
    return 0.0 if divisor is None or not divisor.numel() else float(divisor.max().reciprocal())
