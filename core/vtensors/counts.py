"""Numbers with their nouns and verbs, as sentences need them."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number and its noun: `1 shard`, `0 shards`, `2,000 shards`. plural: where it is not noun + s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def agreeing(number: int, singular: str, plural: str) -> str:
    """The verb that goes with so many: `is` of `is, are`, or `match` of `matches, match`."""
    return singular if number == 1 else plural
