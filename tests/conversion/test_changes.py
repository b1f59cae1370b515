"""Reciprocals and widening, bit by bit against torch."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors import WeightValueError
from vtensors.conversion.changes import (
    bfloat16_to_float32,
    exponents_to_float32,
    float16_to_float32,
    is_all_zero,
    reciprocal_float32,
    ulps_after_two_reciprocals,
)

NORMAL = st.floats(2.0**-120, 2.0**120, width=32)


@given(st.lists(NORMAL, min_size=1, max_size=50))
def test_the_reciprocal_is_the_float32_quotient(values: list[float]) -> None:
    data = struct.pack(f"<{len(values)}f", *values)
    expected = 1.0 / torch.tensor(values, dtype=torch.float32)
    assert reciprocal_float32(data) == struct.pack(f"<{len(values)}f", *expected.tolist())


@given(NORMAL)
def test_two_reciprocals_are_off_by_one_ulp_at_most(value: float) -> None:
    assert ulps_after_two_reciprocals(struct.pack("<f", value)) <= 1


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.inf, math.nan, 1e-45])
def test_a_value_without_a_reciprocal_is_refused(value: float) -> None:
    with pytest.raises(WeightValueError):
        reciprocal_float32(struct.pack("<f", value))


def test_every_bfloat16_and_float16_is_widened_exactly() -> None:
    words = bytes(byte for number in range(65536) for byte in (number & 255, number >> 8))
    for dtype, widen in ((torch.bfloat16, bfloat16_to_float32), (torch.float16, float16_to_float32)):
        narrow = torch.frombuffer(bytearray(words), dtype=dtype)
        ours = torch.frombuffer(bytearray(widen(words)), dtype=torch.float32)
        assert torch.equal(ours.nan_to_num(7.0), narrow.float().nan_to_num(7.0))


def test_every_e8m0_exponent_is_exact_and_nan_is_refused() -> None:
    ours = struct.unpack("<255f", exponents_to_float32(bytes(range(255))))
    assert list(ours) == [2.0 ** (byte - 127) for byte in range(255)]
    with pytest.raises(WeightValueError):
        exponents_to_float32(b"\x7f\xff")


@pytest.mark.parametrize(
    ("data", "dtype", "zero"),
    [
        (b"\0\0", "BF16", True),
        (b"\0\x80", "BF16", True),
        (b"\x80\0", "BF16", False),
        (b"\0\0\0\x80", "F32", True),
        (b"\x80", "F8_E4M3", True),
        (b"\x80", "I8", False),
        (b"\0\0\0\0", "I32", True),
        (b"", "I8", True),
    ],
)
def test_zero_is_told_from_not_zero(data: bytes, dtype: str, zero: bool) -> None:
    assert is_all_zero(data, dtype) is zero
