"""Every code that `verify` may give, by name.

The table in docs/verify.md is made from this one; codes are stable, others may be added.
"""

from __future__ import annotations

from types import MappingProxyType

from vtensors.verification.codes_structure import STRUCTURE_CODES
from vtensors.verification.codes_values import VALUE_CODES

CODES = MappingProxyType({code.name: code for code in (*STRUCTURE_CODES, *VALUE_CODES)})


def markdown_table() -> str:
    """The table of docs/verify.md."""
    head = "| code | severity | meaning | expected | what to do |\n|---|---|---|---|---|\n"
    rows = ((f"`{c.name}`", c.severity, c.meaning, c.expected, c.fix) for c in CODES.values())
    return head + "".join(f"| {' | '.join(_in_a_cell(text) for text in row)} |\n" for row in rows)


def _in_a_cell(text: str) -> str:
    """The text with its bars escaped: that of q|k|v would end the cell."""
    return text.replace("|", "\\|")
