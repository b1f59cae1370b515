from __future__ import annotations

import pytest

from vtensors.counts import agreeing, counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 shards"), (1, "1 shard"), (2, "2 shards"), (12345, "12,345 shards")]
)
def test_one_thing_is_singular_and_any_other_number_plural(number: int, words: str) -> None:
    assert counted(number, "shard") == words


def test_a_plural_of_its_own_is_given() -> None:
    assert counted(1, "entry", "entries") == "1 entry"
    assert counted(3, "entry", "entries") == "3 entries"


def test_the_verb_agrees_with_the_number() -> None:
    assert [agreeing(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]
