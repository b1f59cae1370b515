"""Many module names in one: numbers that run over layers and experts are collapsed to ranges. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# A whole part of a dotted name; not the end of a range such as `1..32`.
_NUMBER = re.compile(r"(?<=[^.]\.)\d+(?=\.|$)")
_MOST_RANGES = 3


def without_numbers(text: str) -> str:
    """The text with each number that is a part of a dotted name replaced by `*`."""
    return _NUMBER.sub("*", text)


def collapsed(groups: Iterable[Sequence[str]]) -> str:
    """One name for groups of modules that differ in their numbers only, such as layers and experts.

    `model.layers.{0-63}.mlp.gate_proj|up_proj`: the numbers as ranges, the names of one group's modules behind
    what they share, joined by `|`. Raises ValueError where the groups differ in more than numbers.
    """
    found = [tuple(group) for group in groups]
    shapes = {tuple(map(without_numbers, group)) for group in found}
    if len(shapes) != 1:
        raise ValueError(f"these are not one group of names: {sorted(shapes)[:3]}")
    seen: list[set[int]] = []
    for group in found:
        numbers = [int(number) for number in _NUMBER.findall(group[0])]
        seen = [
            places | {number}
            for places, number in zip(seen or [set() for _ in numbers], numbers, strict=True)
        ]
    ranges = iter([_ranges(sorted(places)) for places in seen])
    first, *others = found[0]
    shown = _NUMBER.sub(lambda _: next(ranges), first)
    depth = _shared_depth(found[0])
    return "|".join((shown, *(other.split(".", depth)[-1] for other in others)))


def _shared_depth(names: Sequence[str]) -> int:
    """How many dotted parts all names begin with alike, the last part of the shortest left out."""
    depth = 0
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        depth += 1
    return depth


def _ranges(numbers: Sequence[int]) -> str:
    """`{0-63}`, `{3,7,11}`; `{0-62: 48 of them}` where there are many gaps; a single number as it is."""
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if len(spans) > _MOST_RANGES:
        return f"{{{numbers[0]}-{numbers[-1]}: {len(numbers)} of them}}"
    return "{" + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans) + "}"
