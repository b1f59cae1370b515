"""JSON read strictly: a document that two readers could understand differently is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from vtensors.counts import counted
from vtensors.errors import CheckpointError, VtensorsError

MAX_DEPTH = 64
# The bound that safetensors sets for a header; index and config files are held to it as well.
MAX_BYTES = 100_000_000

# Values in one document. Python needs up to 70 bytes for a value that is written in three.
MAX_VALUES = 2_000_000
_ACCEPTED = "JSON in UTF-8, each key once, finite numbers"
_FIX = "download or write the file again"

# No size, id or hash that a configuration gives as a number has more digits; floats end below 10^309.
_LONG_NUMBER = re.compile(rb"[0-9]{40}")

_HALF_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(
    data: bytes,
    *,
    file: str,
    what: str,
    error: type[VtensorsError] = CheckpointError,
    max_depth: int = MAX_DEPTH,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    allow_infinity: bool = False,
) -> object:
    """The value that the JSON text `data` holds.

    file, what: named in messages, for example `model.safetensors` and `header`.
    error: class that is raised.
    max_depth: nested objects and arrays allowed, the outermost counts as one.
    max_bytes: length allowed.
    max_values: commas and opening brackets allowed, those inside of strings count too; this bounds the memory.
    allow_infinity: accept `Infinity` and `-Infinity`, which transformers writes into config.json.

    Raises `error` for invalid UTF-8, text that is not JSON, a key that appears twice in one object, NaN,
    infinite numbers, integers of 40 digits or more, half a surrogate pair, and
    for text that is too long, too deep or holds too many values.
    """
    if len(data) > max_bytes:
        raise error(
            f"the {what} is too long",
            file=file,
            seen=counted(len(data), "byte"),
            accepted=f"at most {max_bytes} bytes",
            fix=_FIX,
        )
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > max_values:
        raise error(
            f"the {what} holds too many values",
            file=file,
            seen=f"{values}",
            accepted=f"at most {max_values}",
            fix=_FIX,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(
            f"the {what} is not valid UTF-8",
            file=file,
            seen=f"byte {data[cause.start]:#04x} at {cause.start}",
            accepted="JSON in UTF-8",
            fix=_FIX,
        ) from cause
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant_parser(allow_infinity),
            parse_float=_finite_float,
            # A hook for every integer would double the time of a header.
            parse_int=_bounded_int if _LONG_NUMBER.search(data) else None,
        )
    except _RefusedValueError as cause:
        raise error(f"the {what} {cause}", file=file, accepted=_ACCEPTED, fix=_FIX) from cause
    except RecursionError as cause:
        raise error(
            f"the {what} is nested too deeply", file=file, accepted=f"{max_depth} levels", fix=_FIX
        ) from cause
    except ValueError as cause:  # JSONDecodeError, and integers of more digits than Python converts
        raise error(
            f"the {what} is not JSON: {cause}", file=file, seen=_opening(data), accepted=_ACCEPTED, fix=_FIX
        ) from cause
    if _deeper_than(value, max_depth):
        raise error(f"the {what} is nested too deeply", file=file, accepted=f"{max_depth} levels", fix=_FIX)
    if _HALF_SURROGATE.search(data):
        _check_surrogates(value, file=file, what=what, error=error)
    return value


class _RefusedValueError(ValueError):
    """Valid for Python's JSON reader, refused here."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedValueError(f"holds the key {key!r} twice")
            seen.add(key)
    return made


def _constant_parser(allow_infinity: bool) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if allow_infinity and text != "NaN":
            return -math.inf if text.startswith("-") else math.inf
        raise _RefusedValueError(f"holds {text}, which is not a JSON number")

    return parse


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _RefusedValueError(f"holds the number {text[:40]}, which is too large")
    return value


def _bounded_int(text: str) -> int:
    if len(text) >= 40:
        raise _RefusedValueError(f"holds the number {text[:40]}..., which is too large")
    return int(text)


def _deeper_than(value: object, max_depth: int) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth):
        if not level:
            return False
        # Level by level, so that a header of 100,000 tensors costs three list comprehensions.
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
    return bool(level)


def _check_surrogates(value: object, *, file: str, what: str, error: type[VtensorsError]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as cause:
        raise error(
            f"the {what} holds half a surrogate pair, which no file name or tensor can have",
            file=file,
            accepted=_ACCEPTED,
            fix=_FIX,
        ) from cause


def _opening(data: bytes) -> str:
    return f"{counted(len(data), 'byte')} beginning with {data[:32]!r}"
