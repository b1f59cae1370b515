"""Weights that run on the reference although the device could have had a kernel: said once, counted, refusable."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vtensors.errors import RequestError
from vtensors.modules import is_quantized
from vtensors.records import KernelSpec, Selected

_log = logging.getLogger("vtensors")


def report_fallbacks(
    selected: Sequence[Selected], kernels: Sequence[KernelSpec], device_type: str, *, refuse: bool
) -> int:
    """The number of linears on a reference kernel; one line per scheme, with the reason of the last candidate.

    On a CPU the reference is the kernel, not a fallback. refuse: `VT_STRICT=fallbacks`.
    Errors: RequestError instead of the lines, where refuse is set and there is one.
    """
    if device_type == "cpu":
        return 0
    references = {kernel.name for kernel in kernels if kernel.numerics == "reference"}
    found: dict[tuple[str, str], list[Selected]] = {}
    for record in selected:
        # A plain weight goes to the device's own library from the reference too.
        if record.op == "linear" and record.kernel in references and is_quantized(record.scheme):
            found.setdefault((record.scheme, record.executed), []).append(record)
    lines = [_line(records, scheme, executed) for (scheme, executed), records in found.items()]
    if lines and refuse:
        raise RequestError(
            "weights would run on the reference kernel, and VT_STRICT=fallbacks refuses that",
            seen="; ".join(lines),
            fix="choose a dtype and activations that a kernel serves, or unset VT_STRICT",
        )
    for line in lines:
        _log.warning("fallback: %s", line)
    return sum(len(records) for records in found.values())


def _line(records: Sequence[Selected], scheme: str, executed: str) -> str:
    first = records[0]
    reasons = [
        f"{name} {reason}" for name, reason in first.rejected if scheme in name or len(first.rejected) == 1
    ]
    why = f" ({reasons[-1]})" if reasons else ""
    return f"{len(records)} {scheme} weights with {executed} activations run on {first.kernel}{why}"
