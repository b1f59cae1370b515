"""Checks of a Weight against the values it must give, for the conformance kit."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from vtensors.records import Scheme


def check_equal(found: Tensor, expected: Tensor, *, what: str) -> None:
    """Raises AssertionError, naming the first differing element, unless dtype, shape and values are equal.

    The sign of a zero does not count; NaN equals NaN.
    """
    if found.dtype != expected.dtype or found.shape != expected.shape:
        wanted = f"{expected.dtype} {list(expected.shape)}"
        raise AssertionError(f"{what}: found {found.dtype} {list(found.shape)}, expected {wanted}")
    differs = ~((found == expected) | (found.isnan() & expected.isnan()))
    if bool(differs.any()):
        index = tuple(int(place) for place in differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} values differ, the first at {list(index)}: "
            f"found {float(found[index])!r}, expected {float(expected[index])!r}"
        )


def check_rows(weight: Any, expected: Tensor, *, what: str) -> None:
    """Raises AssertionError unless rows(a, b) gives rows a..b, and rows of rows do too."""
    n = expected.shape[0]
    third = n // 3
    ranges = {(0, n), (0, 1), (n - 1, n), (third, n - third), (0, 0), (max(0, third - 1), third + 1)}
    for start, stop in sorted(ranges):
        part = weight.rows(start, stop)
        check_equal(
            part.dequantize(torch.float32), expected[start:stop], what=f"{what}: rows {start}..{stop}"
        )
    inner = weight.rows(third, n).rows(0, n - third)
    check_equal(inner.dequantize(torch.float32), expected[third:], what=f"{what}: rows of rows from {third}")


def check_dtypes(weight: Any, expected: Tensor, *, what: str) -> None:
    """Raises AssertionError unless bfloat16 and float16 are the float32 values rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        check_equal(weight.dequantize(dtype), expected.to(dtype), what=f"{what}: as {dtype}")


def check_moves(weight: Any, expected: Tensor, *, what: str) -> None:
    """Raises AssertionError unless the weight gives the same values on each device there is."""
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        moved = weight.to(device).dequantize(torch.float32)
        if moved.device.type != device:
            raise AssertionError(f"{what}: to('{device}') stays on {moved.device}")
        check_equal(moved.cpu(), expected, what=f"{what}: on {device}")


def import_weight_class(scheme: Scheme) -> type:
    """The class that the record's `weight_class` points to. Raises AssertionError if it is none."""
    module, _, name = scheme.weight_class.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        raise AssertionError(f"{scheme.weight_class} is not a class")
    return found
