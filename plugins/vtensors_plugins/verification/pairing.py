"""Which weight of a reference a weight answers to, across prefixes, fused matrices and stacked experts."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.matching import FUSED, spellings
from vtensors.modules import Module

# Parts that lie one below the other in the fused matrix. `in_proj_qkvz` interleaves heads in some families.
_STACKED = ("qkv_proj", "gate_up_proj")


@attrs.frozen(kw_only=True)
class Pair:
    """module against rows there..there + N of other. here: rows that are compared, from 0 unless other is a part.

    A whole module has here = there = 0 and rows = N.
    """

    module: Module
    other: Module
    here: int
    there: int
    rows: int


@attrs.frozen(kw_only=True)
class Pairing:
    """pairs: what can be compared. missing_here, missing_there: modules of one side alone. misfits: shapes."""

    pairs: tuple[Pair, ...]
    missing_here: tuple[Module, ...]
    missing_there: tuple[Module, ...]
    misfits: tuple[tuple[Module, Module], ...]


def pair_modules(checkpoint: Checkpoint, reference: Checkpoint) -> Pairing:
    """Every weight of both checkpoints, paired by the model's own names.

    The same text model may lie under another prefix; stacked experts have names of their own already; a fused
    q|k|v or gate|up on one side is cut by the rows of its parts.
    """
    ours, theirs = _by_name(checkpoint), _by_name(reference)
    pairs: list[Pair] = []
    misfits: list[tuple[Module, Module]] = []
    done: set[str] = set()
    found: set[str] = set()
    for name in ours:
        if name in theirs:
            done.add(name)
            found.add(name)
            if ours[name].shape == theirs[name].shape:
                pairs.append(_whole(ours[name], theirs[name]))
            else:
                misfits.append((ours[name], theirs[name]))
    for name in [name for name in theirs if name not in found]:
        cut = _parts(name, theirs[name], ours)
        if cut is not None:
            found.add(name)
            done.update(part for part, _ in cut)
            pairs.extend(
                Pair(module=ours[part], other=theirs[name], here=0, there=first, rows=ours[part].shape[0])
                for part, first in cut
            )
    for name in [name for name in ours if name not in done]:
        cut = _parts(name, ours[name], theirs)
        if cut is not None:
            done.add(name)
            found.update(part for part, _ in cut)
            pairs.extend(
                Pair(module=ours[name], other=theirs[part], here=first, there=0, rows=theirs[part].shape[0])
                for part, first in cut
            )
    return Pairing(
        pairs=tuple(pairs),
        missing_here=tuple(module for name, module in theirs.items() if name not in found),
        missing_there=tuple(module for name, module in ours.items() if name not in done),
        misfits=tuple(misfits),
    )


def _by_name(checkpoint: Checkpoint) -> dict[str, Module]:
    """Modules under one spelling of their names, whatever the prefix."""
    return {min(spellings(name)): module for name, module in checkpoint.modules.items()}


def _whole(module: Module, other: Module) -> Pair:
    rows = module.shape[0] if module.shape else 1
    return Pair(module=module, other=other, here=0, there=0, rows=rows)


def _parts(name: str, fused: Module, parts: Mapping[str, Module]) -> list[tuple[str, int]] | None:
    """(part, first row in the fused matrix) for each part, None where they do not make up the matrix."""
    owner, _, last = name.rpartition(".")
    if last not in _STACKED or len(fused.shape) != 2:
        return None
    found: list[tuple[str, int]] = []
    row = 0
    for part in (f"{owner}.{part}" for part in FUSED[last]):
        module = parts.get(part)
        if module is None or len(module.shape) != 2 or module.shape[1] != fused.shape[1]:
            return None
        found.append((part, row))
        row += module.shape[0]
    return found if row == fused.shape[0] else None
