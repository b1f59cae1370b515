"""One thing that is wrong or doubtful in a checkpoint, and what to do about it."""

from __future__ import annotations

import attrs

from vtensors.errors import VtensorsError
from vtensors.verification.codes import CODES


@attrs.frozen(kw_only=True)
class Finding:
    """What `verify` says of one tensor, module or file.

    severity: `error` (a load refuses it, or the weights are certainly wrong) or `warning`.
    code: stable word, a key of `CODES`. tensor: full name of the tensor or module, or the file's name.
    seen: what is there. expected: what should be. fix: what to do.
    """

    severity: str
    code: str
    tensor: str
    seen: str
    expected: str
    fix: str

    def to_json(self) -> dict[str, str]:
        """The finding as `verify --json` prints it."""
        return {
            "severity": self.severity,
            "code": self.code,
            "tensor": self.tensor,
            "seen": self.seen,
            "expected": self.expected,
            "fix": self.fix,
        }


def finding(code: str, tensor: str, *, seen: str, expected: str = "", fix: str = "") -> Finding:
    """The finding of a code; severity, and a fix or expectation that is not given, come from `CODES`."""
    known = CODES[code]
    return Finding(
        severity=known.severity,
        code=code,
        tensor=tensor,
        seen=seen,
        expected=expected or known.expected,
        fix=fix or known.fix,
    )


def finding_of(code: str, error: VtensorsError, *, tensor: str = "") -> Finding:
    """The finding of a code that an error of loading explains.

    tensor: where the error does not name the right one (its tensor, else its file, is taken).
    """
    seen = f"{error.problem} (seen: {error.seen})" if error.seen else error.problem
    return finding(
        code,
        tensor or error.tensor or error.file or "",
        seen=seen,
        expected=error.accepted or "",
        fix=error.fix or "",
    )
