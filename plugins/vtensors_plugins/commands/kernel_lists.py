"""Lists of kernels within a terminal's width: those that serve by op and scheme, others by reason. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from vtensors.counts import counted
from vtensors_plugins.commands.device_option import state_words
from vtensors_plugins.commands.kernel_facts import UNTESTED, KernelFacts
from vtensors_plugins.commands.schemes_table import hanging

_INDENT = "    "
_GAP = "  "
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def serving_lines(facts: Sequence[KernelFacts], width: int) -> list[str]:
    """A heading for each plugin and state, one for each op with schemes and targets, a line per kernel.

    The line has the kernel's name, rows M and layout, and says where it has no self-test; in columns where those of the
    heading fit the width. A name is never parted.
    """
    lines: list[str] = []
    for source, entries in _grouped((_source(entry), entry) for entry in facts):
        lines += ["", f"{source}: {counted(len(entries), 'kernel')}"]
        for (op, what), same in _grouped(((e.kernel.op, _what(e)), e) for e in entries):
            lines.append(hanging(f"{_GAP}{op}{_GAP}", what, width))
            rows = [_cells(entry) for entry in same]
            widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
            fits = len(_INDENT) + sum(widths) + len(_GAP) * (len(widths) - 1) <= width
            lines += [_columns(cells, widths) if fits else _below(cells, width) for cells in rows]
    return lines


def refused_lines(facts: Sequence[KernelFacts], width: int) -> list[str]:
    """For each reason how many kernels it stands against, and their names folded."""
    lines: list[str] = []
    for reason, entries in _grouped((str(entry.reason), entry) for entry in facts):
        lines.append(hanging(_GAP, f"{reason}: {counted(len(entries), 'kernel')}", width))
        lines += [
            hanging(_INDENT, text, width) for text in folded((e.kernel.op, e.kernel.name) for e in entries)
        ]
    return lines


def folded(kernels: Iterable[tuple[str, str]]) -> list[str]:
    """Names behind the op that they begin with, ops with the same endings together.

    kernels: (op, name). `{linear, linears}{_nvfp4_stream, _nvfp4_wgmma}`; a single name stays whole.
    """
    endings: dict[str, list[str]] = {}
    whole: list[str] = []
    for op, name in kernels:
        if name.startswith(f"{op}_"):
            endings.setdefault(op, []).append(name.removeprefix(op))
        else:
            whole.append(name)
    told = []
    for ends, ops in _grouped((tuple(ends), op) for op, ends in endings.items()):
        if len(ends) == len(ops) == 1:
            told.append(f"{ops[0]}{ends[0]}")
        else:
            told.append(f"{_braced(ops)}{_braced(ends)}")
    return [*told, *whole]


def _braced(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else "{" + ", ".join(parts) + "}"


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(size) for cell, size in zip(cells, widths, strict=False))
    return f"{_INDENT}{_GAP.join(padded)}".rstrip()


def _below(cells: Sequence[str], width: int) -> str:
    return f"{_INDENT}{cells[0]}\n{hanging(_INDENT * 2, ', '.join(cells[1:]), width)}"


def _source(entry: KernelFacts) -> str:
    plugin = entry.plugin if entry.plugin == entry.distribution else f"{entry.plugin} ({entry.distribution})"
    return f"{plugin}, {state_words(entry.state)}" if entry.state else plugin


def _what(entry: KernelFacts) -> str:
    schemes = "all schemes" if "*" in entry.kernel.schemes else ", ".join(entry.kernel.schemes)
    return f"{schemes}; made for {', '.join(entry.kernel.targets)}"


def _cells(entry: KernelFacts) -> tuple[str, ...]:
    untested = (UNTESTED,) if entry.kernel.untested else ()
    return entry.kernel.name, entry.rows, entry.kernel.layout, *untested


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> list[tuple[Key, list[Value]]]:
    """The values under each key, in the order of the first ones."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return list(found.items())
