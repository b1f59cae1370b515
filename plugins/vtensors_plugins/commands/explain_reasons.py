"""Why kernels lost, as `explain` tells it: whose costs are compared, which reasons matter, alike ones together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from vtensors.kernel_candidates import Rows, rows_in_words
from vtensors.kernel_rules import SWITCH
from vtensors.records import KernelSpec
from vtensors.registry import Owned
from vtensors_plugins.commands.kernel_facts import modelled_for

Kernels = Mapping[str, Owned[KernelSpec]]
Reasons = Sequence[tuple[str, str]]
# As `kernel_plans.Segment.lost` compares costs: the loser's, then the winner's.
_COMPARED = re.compile(r"(\S+ us) (measured|modelled); (\S+) (\S+ us) (measured|modelled)")
# As `selection` says why an op is taken apart.
_APART = "(modelled)"


def reworded(name: str, reason: str, kernels: Kernels) -> str:
    """The reason with what modelled costs are modelled for.

    A reference kernel's cost is a way to say that it comes last.
    """
    owner = kernels.get(name)
    if owner is None:
        return reason
    found = _COMPARED.fullmatch(reason)
    if found is None:
        return reason.replace(_APART, f"({_how('modelled', name, kernels)})")
    if owner.record.numerics == "reference" and found[2] == "modelled":
        return "the reference, taken where nothing else serves"
    cost, how, winner, least, other = found.groups()
    mine, theirs = _how(how, name, kernels), _how(other, winner, kernels)
    if mine == theirs:
        return f"{cost}, {winner} {least}, both {mine}"
    return f"{cost} {mine}, {winner} {least} {theirs}"


def told_reasons(
    lost: Sequence[tuple[Rows, Reasons]], kernels: Mapping[str, KernelSpec]
) -> list[tuple[str, str]]:
    """Each kernel of the ranges with its reasons in one sentence; one that holds for every range is told once.

    A range of which the kernel serves no row is left out, and so is a kernel that is left with none.
    """
    found: dict[str, list[tuple[Rows, str]]] = {}
    for tokens, reasons in lost:
        for name, reason in reasons:
            found.setdefault(name, []).append((tokens, reason))
    told = []
    for name, entries in found.items():
        words = {reason for _, reason in entries}
        if len(words) == 1 and len(entries) == len(lost):
            told.append((name, entries[0][1]))
            continue
        kernel = kernels.get(name)
        near = [entry for entry in entries if kernel is None or _meet(kernel.tokens, entry[0])]
        if near:
            told.append(
                (name, "; ".join(f"{rows_in_words(rows)}: {reason}" for rows, reason in _joined(near)))
            )
    return told


def together(reasons: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(names, reason), each reason once: what the user asked for first."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons:
        found.setdefault(reason, []).append(name)
    ordered = sorted(found.items(), key=lambda entry: SWITCH not in entry[0])
    return [(", ".join(dict.fromkeys(names)), reason) for reason, names in ordered]


def _how(how: str, name: str, kernels: Kernels) -> str:
    """`measured`, or `modelled` with the card where that is known."""
    owner = kernels.get(name)
    card = None if owner is None or how == "measured" else modelled_for(owner.record, owner.distribution)
    return how if card is None else f"{how} for {card}"


def _joined(entries: Iterable[tuple[Rows, str]]) -> list[tuple[Rows, str]]:
    """Neighbouring ranges with one reason as one range. entries: in order of the rows."""
    found: list[tuple[Rows, str]] = []
    for rows, reason in entries:
        (first, last), before = found[-1] if found else ((0, None), "")
        if reason == before and last is not None and last + 1 == rows[0]:
            found[-1] = ((first, rows[1]), reason)
        else:
            found.append((rows, reason))
    return found


def _meet(rows: Rows, others: Rows) -> bool:
    """Whether two ranges have a row in common."""
    ends = [last for last in (rows[1], others[1]) if last is not None]
    return not ends or max(rows[0], others[0]) <= min(ends)
