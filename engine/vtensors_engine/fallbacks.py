"""Weights and models that run slower than they were meant to: told once per cause, counted, refusable.

Three causes: a quantized weight on the reference although the device could have had a kernel; a kernel that failed,
so that another took its place; a kernel that `VT_KERNELS` asks for where a weight of the scheme has none such. A rule
that forbids what no weight would have had, or that speaks of schemes the model lacks, is told, and no fallback.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vtensors.counts import agreeing, counted
from vtensors.errors import RequestError
from vtensors.kernel_candidates import rows_in_words
from vtensors.kernel_rules import NO_RULES, KernelRules
from vtensors.modules import is_quantized
from vtensors.records import KernelSpec, Selected

_log = logging.getLogger("vtensors")
# Reasons in one line; `vtensors explain` gives them all.
_MOST_REASONS = 3
# How the reasons of `kernel_binding` and `verdicts` begin where a kernel should have worked and did not.
_FAILED = "failed "


def report_fallbacks(
    selected: Sequence[Selected],
    kernels: Sequence[KernelSpec],
    device_type: str,
    *,
    refuse: bool,
    rules: KernelRules = NO_RULES,
) -> int:
    """The number of weights that fell back; one line per cause.

    On a CPU the reference is the kernel, not a fallback. Plain weights and embeddings go to the device's own
    library from the reference too. refuse: `VT_STRICT=fallbacks`.
    Errors: RequestError instead of the lines, where refuse is set and there is one.
    """
    references = {kernel.name for kernel in kernels if kernel.numerics == "reference"}
    slow = [] if device_type == "cpu" else [r for r in selected if _runs_on(r, references)]
    failed = [record for record in selected if _failures(record)]
    asked = {(op, r.scheme) for r in selected for op in (r.op, r.asked or r.op)}
    in_vain = rules.in_vain(asked, kernels)
    lines = [*_slow_lines(slow, references, kernels), *_failed_lines(failed), *in_vain]
    if lines and refuse:
        raise RequestError(
            "weights would run on a fallback, and VT_STRICT=fallbacks refuses that",
            seen="; ".join(lines),
            fix="choose a dtype, activations and VT_KERNELS that a kernel serves, or unset VT_STRICT",
        )
    for line in lines:
        _log.warning("fallback: %s", line)
    for line in rules.notes(asked, kernels):
        if line not in in_vain:
            _log.warning("%s", line)
    return len({record.module for record in (*slow, *failed)})


def report_slow_runner(device: str, cause: Exception, *, refuse: bool) -> int:
    """1, a fallback: the reference runner runs a model on a device that could have had a fast one; one line says why.

    refuse: `VT_STRICT=fallbacks`. Raises RequestError instead of the line where it is set.
    """
    reason = str(cause) or type(cause).__name__
    if refuse:
        raise RequestError(
            f"the model would run on the reference runner on {device}, and VT_STRICT=fallbacks refuses that",
            seen=reason,
            fix="mend the cause, or unset VT_STRICT",
        ) from cause
    _log.warning("fallback: %s: the reference runner is used, which is exact, not fast: %s", device, reason)
    return 1


def _runs_on(record: Selected, references: set[str]) -> bool:
    used = {name for *_, name in record.kernels} or {record.kernel}
    return record.op != "embedding" and is_quantized(record.scheme) and not references.isdisjoint(used)


def _slow_lines(
    records: Sequence[Selected], references: set[str], kernels: Sequence[KernelSpec]
) -> list[str]:
    """One per scheme and activations, with the reasons of the kernels that compute this scheme."""
    found: dict[tuple[str, str, str], list[Selected]] = {}
    for record in records:
        where = ", ".join(
            rows_in_words((first, last))
            for first, last, name in record.kernels
            if name in references and (first, last) != (1, None)
        )
        found.setdefault((record.scheme, record.executed, where), []).append(record)
    lines = []
    for (scheme, executed, where), same in found.items():
        first = same[0]
        reference = next((n for *_, n in first.kernels if n in references), first.kernel)
        able = {kernel.name for kernel in kernels if scheme in kernel.schemes}
        reasons = [f"{name}: {reason}" for name, reason in first.rejected if name in able]
        more = len(reasons) - _MOST_REASONS
        told = "; ".join(reasons[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
        lines.append(
            f"{counted(len(same), f'{scheme} weight')} with {executed} activations "
            f"{agreeing(len(same), 'runs', 'run')} on {reference}"
            f"{f' at {where}' if where else ''} ({told or 'no kernel computes them'})"
        )
    return lines


def _failed_lines(records: Sequence[Selected]) -> list[str]:
    """One per kernel and reason, with what took its place."""
    found: dict[tuple[str, str], list[Selected]] = {}
    for record in records:
        for failure in _failures(record):
            found.setdefault(failure, []).append(record)
    return [
        f"{name} {reason}; {counted(len(same), 'weight')} {agreeing(len(same), 'runs', 'run')} on "
        f"{' and '.join(sorted({r.kernel for r in same}))}"
        for (name, reason), same in found.items()
    ]


def _failures(record: Selected) -> list[tuple[str, str]]:
    both = dict.fromkeys((*record.rejected, *record.not_fused))
    return [(name, reason) for name, reason in both if reason.startswith(_FAILED)]
