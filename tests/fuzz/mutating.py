"""Mutations for fuzzing: half of them keep the input JSON, the other half are of its bytes."""

from __future__ import annotations

import json
import random

from json_mutations import mutate_json

_TOKENS = (
    b"{}",
    b"[]",
    b'"',
    b",",
    b":",
    b"null",
    b"1e999",
    b"-1",
    b"\\ud800",
    b"\xff",
    b"\x00",
    b"(",
    b")*",
    b"[",
)


def mutate(data: bytes, random_source: random.Random) -> bytes:
    """The input with one to four places changed."""
    times = random_source.randint(1, 4)
    if random_source.random() < 0.6:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return mutate_bytes(data, random_source, times=times)
        changed = mutate_json(document, random_source, times=times)
        return json.dumps(changed, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return mutate_bytes(data, random_source, times=times)


def mutate_bytes(data: bytes, random_source: random.Random, *, times: int) -> bytes:
    """The bytes with `times` of them flipped, removed, repeated or joined by a token of the syntax."""
    changed = bytearray(data)
    for _ in range(times):
        place = random_source.randrange(len(changed) + 1)
        kind = random_source.randrange(4)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << random_source.randrange(8)
        elif kind == 1:
            del changed[place : place + random_source.randint(1, 16)]
        elif kind == 2:
            changed[place:place] = changed[place : place + random_source.randint(1, 64)]
        else:
            changed[place:place] = random_source.choice(_TOKENS)
    return bytes(changed)
