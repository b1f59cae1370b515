"""`VT_DEBUG_NAN`: the first part of a model whose output is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import VtensorsError

_FIX = (
    "its input was finite, so look at its weights with `vtensors verify` and at its kernel with `vtensors explain`; "
    "dtype float32 tells an overflow of 16 bits from bad weights"
)


def check_finite(x: Tensor, place: str, part: str) -> Tensor:
    """x itself. x: any shape and floating dtype. place: a module, such as `layers.3`. part: what of it gave x.

    Waits for the device. Raises VtensorsError naming place, part and how many values are NaN and infinite.
    """
    if bool(torch.isfinite(x).all()):
        return x
    nan, infinite = int(torch.isnan(x).sum()), int(torch.isinf(x).sum())
    raise VtensorsError(
        f"VT_DEBUG_NAN: the {part} is the first part whose output is not finite",
        tensor=place,
        seen=f"{nan} NaN and {infinite} infinite of {x.numel()} values, shape {list(x.shape)}, {x.dtype}",
        fix=_FIX,
    )
