"""Findings about the values of single tensors, from what the scan counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vtensors.checkpoint import Checkpoint
from vtensors.errors import VtensorsError
from vtensors.modules import Module
from vtensors.plugin_candidates import OWN_DISTRIBUTION
from vtensors.reading import TensorReader
from vtensors.verification.findings import Finding, finding, finding_of
from vtensors_plugins.row_windows import RowWindows
from vtensors_plugins.verification.kinds import Kind, Subject
from vtensors_plugins.verification.scanning import Scan
from vtensors_plugins.verification.tallies import Fault, Tally
from vtensors_plugins.verification.zero_scales import zero_scales

_CODES = (Kind.PLAIN, Kind.E4M3_CODES, Kind.E2M1_CODES)


def value_findings(
    checkpoint: Checkpoint, subjects: Sequence[Subject], scan: Scan, reader: TensorReader
) -> Iterator[Finding]:
    """Bad codes and scales (each code once per tensor, with count and first index), matrices of zeros."""
    for subject in subjects:
        tally = scan.tallies.get(subject.info.name)
        if tally is None:
            continue
        for code, fault in tally.faults.items():
            if code == "scale-zero" and subject.zero_is_legal:
                yield from _zero_scales(checkpoint, subject, reader)
            else:
                yield finding(code, subject.info.name, seen=_described(subject, fault))
        if _is_all_zero(subject, tally):
            yield finding(
                "all-zero", subject.info.name, seen=f"{subject.info.describe()}: every value is zero"
            )


def plugin_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the weights of third parties' conventions refuse by themselves."""
    for name, module in checkpoint.modules.items():
        if checkpoint.plugins.registry.conventions[module.convention].distribution == OWN_DISTRIBUTION:
            continue
        try:
            checkpoint.read(name)
        except VtensorsError as problem:
            yield finding_of("bad-values", problem, tensor=problem.tensor or name)


def _described(subject: Subject, fault: Fault) -> str:
    total = math.prod(subject.info.shape)
    if total == 1:
        return repr(fault.value)
    index = list(_unravel(fault.first, subject.info.shape))
    values = "value is" if fault.count == 1 else "values are"
    word = "NaN or infinite" if fault.count > 1 and not math.isfinite(fault.value) else repr(fault.value)
    return f"{fault.count:,} of {total:,} {values} {word}; the first at {index}: {fault.value!r}"


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def _zero_scales(checkpoint: Checkpoint, subject: Subject, reader: TensorReader) -> Iterator[Finding]:
    for module in subject.modules:
        found = zero_scales(RowWindows.of(checkpoint, module.name, reader))
        if found is not None:
            where = f" of {module.name}" if _is_shared(module) else ""
            yield finding(
                "scale-zero",
                subject.info.name,
                seen=f"{found.count:,} zero scales{where} over codes that are not; the first at "
                f"{list(found.first)}",
            )


def _is_shared(module: Module) -> bool:
    return module.claim.part is not None


def _is_all_zero(subject: Subject, tally: Tally) -> bool:
    info = subject.info
    is_matrix = subject.role == "codes" and len(info.shape) > 1
    return is_matrix and subject.kind in _CODES and not tally.nonzero and info.nbytes > 0
