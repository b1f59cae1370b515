"""E8M0 bytes: all 256 of them, and the three exponent rules."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors_formats import e8m0
from vtensors_formats.e8m0 import ExponentRule

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def stored_as(dtype: torch.dtype) -> torch.Tensor:
    return EVERY_BYTE if dtype == torch.uint8 else EVERY_BYTE.view(dtype)


@pytest.mark.parametrize("dtype", e8m0.DTYPES)
def test_every_byte_is_its_power_of_two_in_either_dtype(dtype: torch.dtype) -> None:
    values = e8m0.decode(stored_as(dtype)).tolist()
    assert values[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(values[255])


@pytest.mark.parametrize("dtype", e8m0.DTYPES)
def test_scale_bytes_are_never_cast_by_value(dtype: torch.dtype) -> None:
    stored = torch.tensor([120, 125, 127, 130, 140], dtype=torch.uint8)
    typed = stored if dtype == torch.uint8 else stored.view(dtype)
    assert e8m0.decode(typed).tolist() == [2.0**-7, 0.25, 1.0, 8.0, 8192.0]


def test_the_reciprocal_of_every_byte_is_exact() -> None:
    values = e8m0.reciprocal(EVERY_BYTE).tolist()
    assert values[:255] == [2.0 ** (127 - byte) for byte in range(255)]
    assert math.isnan(values[255])


def expected_byte(amax: float, rule: ExponentRule) -> int:
    """The rule in exact rational arithmetic."""
    exact = Fraction(amax)
    if rule is ExponentRule.CEIL:
        # modelopt divides in float32 before it takes the logarithm.
        exact = Fraction(torch.tensor(amax).div(448.0).item())
        if exact == 0:
            return 0
        exponent = next(e for e in range(-160, 140) if exact <= Fraction(2) ** e)
    else:
        exponent = next(e for e in range(140, -160, -1) if Fraction(2) ** e <= exact)
        if rule is ExponentRule.FLOOR_ROUNDED and exact >= Fraction(7, 4) * Fraction(2) ** exponent:
            exponent += 1
        exponent -= 8
    return max(0, min(254, exponent + 127))


@pytest.mark.parametrize("rule", ExponentRule)
@given(amax=st.floats(2.0**-120, 2.0**127, width=32))
def test_encoding_follows_the_rule_in_exact_arithmetic(rule: ExponentRule, amax: float) -> None:
    assert e8m0.encode(torch.tensor([amax]), rule).item() == expected_byte(amax, rule)


@pytest.mark.parametrize(
    ("amax", "ceil", "floor", "rounded"),
    [(448.0, 127, 127, 128), (449.0, 128, 127, 128), (256.0, 127, 127, 127), (224.0, 126, 126, 127)],
)
def test_the_three_rules_differ_where_they_should(amax: float, ceil: int, floor: int, rounded: int) -> None:
    rules = (ExponentRule.CEIL, ExponentRule.FLOOR, ExponentRule.FLOOR_ROUNDED)
    assert [e8m0.encode(torch.tensor(amax), rule).item() for rule in rules] == [ceil, floor, rounded]


@pytest.mark.parametrize("rule", ExponentRule)
def test_zero_infinity_and_nan_have_bytes_of_their_own(rule: ExponentRule) -> None:
    assert e8m0.encode(torch.tensor([0.0, math.inf, math.nan]), rule).tolist() == [0, 254, 255]


def test_the_first_byte_above_another_is_found() -> None:
    stored = torch.full((4, 3), 0xFE, dtype=torch.uint8)
    assert e8m0.first_above(stored, 0xFE) is None
    stored[2, 1] = 0xFF
    assert e8m0.first_above(stored, 0xFE) == (2, 1)
    assert all(e8m0.first_above(stored.view(dtype), 0xFE) == (2, 1) for dtype in e8m0.DTYPES)
