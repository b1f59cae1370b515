"""One code that `verify` may give."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

ERROR = "error"
WARNING = "warning"


@attrs.frozen(kw_only=True)
class Code:
    """severity: `error` or `warning`. meaning, expected, fix: one phrase each, for the docs and as defaults."""

    name: str
    severity: str
    meaning: str
    expected: str
    fix: str


def rows(severity: str, *entries: tuple[str, str, str, str]) -> Iterator[Code]:
    """Codes of one severity. entries: name, meaning, expected, fix."""
    for name, meaning, expected, fix in entries:
        yield Code(name=name, severity=severity, meaning=meaning, expected=expected, fix=fix)
