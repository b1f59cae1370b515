"""E4M3 bytes: all 256 of them, rounding, saturation and the search for NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors_formats import e4m3

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
NAN_BYTES = (0x7F, 0xFF)


def value_of(byte: int) -> float:
    """The value by the definition of the format, in Python floats."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("typed", [False, True])
def test_every_byte_decodes_by_the_definition_of_the_format(typed: bool) -> None:
    stored = EVERY_BYTE.view(torch.float8_e4m3fn) if typed else EVERY_BYTE
    for byte, value in enumerate(e4m3.decode(stored).tolist()):
        expected = value_of(byte)
        assert value == expected or (math.isnan(expected) and math.isnan(value)), hex(byte)


def test_the_values_that_the_conventions_lean_on() -> None:
    stored = torch.tensor([0x38, 0x40, 0x7E, 0x01, 0x08], dtype=torch.uint8)
    assert e4m3.decode(stored).tolist() == [1.0, 2.0, 448.0, 2.0**-9, 2.0**-6]


def test_encoding_every_decoded_byte_gives_the_byte() -> None:
    finite = torch.tensor([byte for byte in range(256) if byte not in NAN_BYTES], dtype=torch.uint8)
    assert torch.equal(e4m3.as_bytes(e4m3.encode(e4m3.decode(finite))), finite)


def test_midpoints_between_all_neighbours_go_to_the_even_byte() -> None:
    for byte in range(0x7E):
        middle = (value_of(byte) + value_of(byte + 1)) / 2
        even = byte if byte % 2 == 0 else byte + 1
        encoded = e4m3.as_bytes(e4m3.encode(torch.tensor([middle, -middle]))).tolist()
        assert encoded == [even, even | 0x80], hex(byte)


def test_encoding_saturates_and_keeps_nan() -> None:
    encoded = e4m3.encode(torch.tensor([449.0, 1e9, math.inf, -math.inf, math.nan]))
    values = e4m3.decode(encoded).tolist()
    assert values[:4] == [448.0, 448.0, 448.0, -448.0]
    assert math.isnan(values[4])


@pytest.mark.parametrize("byte", NAN_BYTES)
@pytest.mark.parametrize("index", [(0, 0), (3, 5), (6, 7)])
def test_the_first_nan_is_found_where_it_is(byte: int, index: tuple[int, int]) -> None:
    stored = torch.full((7, 8), 0x7E, dtype=torch.uint8)
    stored[index] = byte
    stored[6, 7] = byte
    assert e4m3.first_nan(stored.view(torch.float8_e4m3fn)) == index


def test_no_byte_but_the_two_is_taken_for_nan() -> None:
    finite = torch.tensor([byte for byte in range(256) if byte not in NAN_BYTES], dtype=torch.uint8)
    assert e4m3.first_nan(finite) is None
    assert e4m3.first_nan(finite[:0]) is None


def test_a_nan_behind_the_first_chunk_is_found() -> None:
    stored = torch.zeros(5000, 1024, dtype=torch.uint8)
    stored[4990, 1000] = 0xFF
    assert e4m3.first_nan(stored) == (4990, 1000)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=32))
def test_zero_is_plus_and_minus_zero_only(stored: list[int]) -> None:
    found = e4m3.is_zero(torch.tensor(stored, dtype=torch.uint8)).tolist()
    assert found == [byte in (0x00, 0x80) for byte in stored]
