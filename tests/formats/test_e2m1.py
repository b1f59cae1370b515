"""E2M1 codes: every code, every byte, every rounding boundary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors_formats import e2m1

POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_code_has_its_value_and_code_8_is_zero() -> None:
    values = e2m1.decode_codes(torch.arange(16, dtype=torch.uint8))
    assert values.tolist() == POSITIVE + [-value for value in POSITIVE]
    assert values[8] == 0.0


def test_every_byte_holds_the_even_column_in_its_low_nibble() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    table = POSITIVE + [-value for value in POSITIVE]
    expected = [table[nibble] for byte in range(256) for nibble in (byte % 16, byte // 16)]
    assert e2m1.decode(every).tolist() == expected


def test_packing_is_the_fixed_vector_of_both_publishers() -> None:
    packed = e2m1.pack(torch.tensor([1, 2, 15, 8], dtype=torch.uint8))
    assert packed.tolist() == [0x21, 0x8F]
    assert e2m1.unpack(packed).tolist() == [1, 2, 15, 8]


@pytest.mark.parametrize(
    ("boundary", "below", "tie", "above"),
    [
        (0.25, 0, 0, 1),
        (0.75, 1, 2, 2),
        (1.25, 2, 2, 3),
        (1.75, 3, 4, 4),
        (2.5, 4, 4, 5),
        (3.5, 5, 6, 6),
        (5.0, 6, 6, 7),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_midpoint_goes_to_the_even_code_and_its_float32_neighbours_do_not(
    boundary: float, below: int, tie: int, above: int, sign: float
) -> None:
    middle = np.float32(boundary)
    values = [np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(10))]
    codes = e2m1.encode(torch.tensor([sign * float(value) for value in values]))
    assert (codes & 7).tolist() == [below, tie, above]
    assert (codes >> 3).tolist() == [int(sign < 0)] * 3


def test_large_values_and_infinity_saturate_at_6() -> None:
    codes = e2m1.encode(torch.tensor([7.0, 1e30, math.inf, -math.inf]))
    assert e2m1.decode_codes(codes).tolist() == [6.0, 6.0, 6.0, -6.0]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=64))
def test_encoding_the_decoded_codes_gives_the_codes(stored: list[int]) -> None:
    packed = torch.tensor(stored, dtype=torch.uint8)
    assert torch.equal(e2m1.pack(e2m1.encode(e2m1.decode(packed))), packed)


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_no_code_is_nearer_than_the_one_chosen(values: list[float]) -> None:
    chosen = e2m1.decode_codes(e2m1.encode(torch.tensor(values))).tolist()
    for value, rounded in zip(values, chosen, strict=True):
        nearest = min(abs(value - sign * candidate) for candidate in POSITIVE for sign in (1, -1))
        assert abs(value - rounded) == nearest


def test_leading_dimensions_are_kept() -> None:
    packed = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    assert e2m1.decode(packed).shape == (2, 3, 8)
    assert torch.equal(e2m1.decode(packed), e2m1.decode_codes(e2m1.unpack(packed)))
    assert e2m1.decode(packed[:0]).shape == (0, 3, 8)
