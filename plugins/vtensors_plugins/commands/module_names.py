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
    what they share, joined by `|`; names that repeat within a group but for numbers, such as those of experts, are
    ranges too, behind a `+` where others repeat otherwise. Raises ValueError where groups differ in more than numbers.
    """
    found = [tuple(group) for group in groups]
    if len(set(map(without_numbers, found[0]))) < len(found[0]):
        return " + ".join(_side(side) for side in _repeating(found))
    return _side(found)


def _repeating(groups: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """The groups taken apart into small ones in which no name repeats but for numbers: a list per kind of those."""
    kinds: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for group in groups:
        times: dict[str, list[str]] = {}
        for name in group:
            times.setdefault(without_numbers(name), []).append(name)
        alike: dict[int, list[list[str]]] = {}
        for names in times.values():
            alike.setdefault(len(names), []).append(names)
        for columns in alike.values():
            kind = tuple(without_numbers(names[0]) for names in columns)
            kinds.setdefault(kind, []).extend(zip(*columns, strict=True))
    return list(kinds.values())


def _side(found: Sequence[tuple[str, ...]]) -> str:
    """`collapsed` of groups in which no name repeats but for numbers."""
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
