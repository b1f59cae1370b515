"""The table of schemes that `inspect` and `generate` share, and how long sentences are laid out below it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB")
_GAP = "  "
# Joins a part with its count, so that a line never breaks between them; shown as a blank.
TIED = "\N{NO-BREAK SPACE}"
_HEADS = ("scheme", "convention", "declared", "executed", "modules", "size")
_NUMBERS = ("modules", "size")


def size(nbytes: int) -> str:
    """Bytes in decimal units with three digits, for example `21.9 GB` and `2.60 GB`."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{nbytes} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def hanging(head: str, sentence: str, width: int) -> str:
    """The sentence behind its head, each further line below the first one's text; long words stay whole."""
    lines = textwrap.wrap(
        sentence,
        width=max(width - len(head), 30),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return head + f"\n{' ' * len(head)}".join(lines).replace(TIED, " ")


def schemes_table(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """Two lines per row: what is declared and executed with its size, then which parts of the model it is.

    rows: as `inspect --json` gives them under `schemes`. width: of the terminal, in characters. The second
    line begins with the publisher's own word for the scheme.
    """
    cells = [_cells(row) for row in rows]
    widths = [max(len(line[i]) for line in (_HEADS, *cells)) for i in range(len(_HEADS))]
    indent = " " * (widths[0] + len(_GAP))
    over = " " * (len(indent) + widths[1] + len(_GAP))
    lines = [f"{over}activations", _line(_HEADS, widths)]
    for row, line in zip(rows, cells, strict=True):
        lines += [_line(line, widths), *_below(indent, _parts(row), width)]
    return "\n".join(line.rstrip() for line in lines)


def _below(indent: str, parts: str, width: int) -> list[str]:
    return [hanging(indent, parts, width)] if parts else []


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["scheme"],
        row["convention"],
        row["declared"],
        row["executed"],
        f"{row['modules']:,}",
        size(row["bytes"]),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(
        cell.rjust(width) if head in _NUMBERS else cell.ljust(width)
        for head, cell, width in zip(_HEADS, cells, widths, strict=True)
    )


def _parts(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name}{TIED}{count:,}" for name, count in row.get("parts", {}).items())
    words = ", ".join(row.get("algorithms", ()))
    return ": ".join(text for text in (words, parts) if text)
