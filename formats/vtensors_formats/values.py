"""Checks of scale values: what no writer means is refused, naming the tensor and the first bad index."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vtensors.errors import WeightValueError

_REWRITE = "the file is damaged or its writer failed; download it again or quantize the model again"


def tensor_name(names: Mapping[str, str], role: str) -> str:
    """The checkpoint's name of the tensor that has the role, or the role itself where none is given."""
    return names.get(role, role)


def refusal(
    problem: str, *, tensor: str, index: tuple[int, ...], value: str, accepted: str
) -> WeightValueError:
    """The error that names a tensor, the first offending index and the value found there."""
    where = f" at {list(index)}" if index else ""
    return WeightValueError(problem, tensor=tensor, seen=f"{value}{where}", accepted=accepted, fix=_REWRITE)


def first_index(mask: Tensor) -> tuple[int, ...] | None:
    """Index of the first True in row-major order, or None; () for a true scalar."""
    if mask.numel() == 0 or not bool(mask.any()):
        return None
    return tuple(int(i) for i in mask.nonzero()[0])


def require_positive(
    scale: Tensor, *, tensor: str, what: str, largest: float = 1.0, divides: bool = False
) -> None:
    """Raises WeightValueError unless every element is finite and > 0, and float32 holds what it gives.

    scale: any float dtype and shape. largest: the largest code that it multiplies, or divides where it is a divisor.
    """
    wide = scale.to(torch.float32)
    reach = largest / wide if divides else wide * largest
    _require_sign(wide, reach, tensor=tensor, what=what, zero_is_legal=False)


def require_not_negative(scale: Tensor, *, tensor: str, what: str, largest: float = 1.0) -> None:
    """Raises WeightValueError unless every element is finite and >= 0 (-0.0 is zero), and `largest` times as well."""
    wide = scale.to(torch.float32)
    _require_sign(wide, wide * largest, tensor=tensor, what=what, zero_is_legal=True)


def zero_scale_refusal(*, tensor: str, what: str, index: tuple[int, ...]) -> WeightValueError:
    """The error for a zero scale over codes that are not all zero."""
    return refusal(
        f"{what} is zero over codes that are not",
        tensor=tensor,
        index=index,
        value="0.0",
        accepted="a zero scale over zero codes only",
    )


def _require_sign(scale: Tensor, reach: Tensor, *, tensor: str, what: str, zero_is_legal: bool) -> None:
    low = scale < 0 if zero_is_legal else scale <= 0
    index = first_index(~torch.isfinite(scale) | ~torch.isfinite(reach) | low)
    if index is None:
        return
    value = scale[index]
    accepted = "finite values, zero or more" if zero_is_legal else "finite values above zero"
    if not bool(torch.isfinite(value)):
        problem = "is not finite"
    elif float(value) < 0:
        problem = "is negative"
    elif float(value) == 0:
        problem = "is zero"
    else:
        problem = "gives weights that are infinite in float32"
        accepted += ", weights below 3.4e38"
    raise refusal(f"{what} {problem}", tensor=tensor, index=index, value=_shown(value), accepted=accepted)


def _shown(value: Tensor) -> str:
    return repr(float(value))
