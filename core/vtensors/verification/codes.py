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
    return head + "".join(
        f"| `{c.name}` | {c.severity} | {c.meaning} | {c.expected} | {c.fix} |\n" for c in CODES.values()
    )
