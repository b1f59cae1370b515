"""Strict JSON: refused are the texts that two readers could understand differently."""

from __future__ import annotations

import math
import time

import pytest

from vtensors.errors import CheckpointError, DeclarationError
from vtensors.strict_json import MAX_DEPTH, parse_json


def parse(data: bytes, **options: int | bool) -> object:
    return parse_json(data, file="x.json", what="content", **options)  # type: ignore[arg-type]


def test_plain_values_come_back():
    assert parse(b'{"a": [1, 2.5, null, true, "\xc3\xa9"]}') == {"a": [1, 2.5, None, True, "é"]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "'a' twice"),
        (b'[{"x": {"dup": 1, "dup": 1}}]', "'dup' twice"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ', "not JSON"),
        (b"", "not JSON"),
        (b"{} {}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" + b"9" * 5000 + b"]", "too large"),
        (b'{"a": 1' + b"0" * 39 + b"}", "too large"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b'["\\udfff"]', "surrogate"),
    ],
)
def test_ambiguous_or_broken_text_is_refused_naming_the_file(data, says):
    with pytest.raises(CheckpointError, match=r"^x\.json: ") as caught:
        parse(data)
    assert says in str(caught.value)


def test_a_whole_surrogate_pair_is_one_character():
    assert parse(b'["\\ud83d\\ude00"]') == ["\N{GRINNING FACE}"]


def test_the_error_class_is_the_callers():
    with pytest.raises(DeclarationError):
        parse_json(b"{", file="config.json", what="content", error=DeclarationError)


def test_infinity_is_accepted_where_asked_for_but_not_a_number_never():
    assert parse(b"[Infinity, -Infinity]", allow_infinity=True) == [math.inf, -math.inf]
    with pytest.raises(CheckpointError, match="NaN"):
        parse(b"[NaN]", allow_infinity=True)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 2_000, 1_000_000])
def test_deep_nesting_is_refused_and_does_not_exhaust_the_stack(opening, depth):
    closing = b"]" if opening == b"[" else b"}"
    with pytest.raises(CheckpointError, match="nested too deeply"):
        parse(opening * depth + b"1" + closing * depth)


def test_the_depth_allowed_is_accepted():
    parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


def test_unclosed_deep_nesting_is_an_error_of_ours():
    with pytest.raises(CheckpointError):
        parse(b"[" * 1_000_000)


def test_length_is_bounded():
    assert parse(b"[1]", max_bytes=3) == [1]
    with pytest.raises(CheckpointError, match="too long"):
        parse(b"[1 ]", max_bytes=3)


def test_fifteen_megabytes_parse_in_well_under_two_seconds():
    name = b'"model.layers.%d.mlp.experts.7.down_proj.weight":'
    entry = name + b'{"dtype":"U8","shape":[2048,256],"data_offsets":[0,1]}'
    data = b"{" + b",".join(entry % number for number in range(130_000)) + b"}"
    begun = time.process_time()
    parse(data)
    assert time.process_time() - begun < 2.0  # about 0.4 s on one slow core
