"""Findings about the values of single tensors, from what the scan counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from vtensors.checkpoint import Checkpoint
from vtensors.counts import agreeing, counted
from vtensors.errors import VtensorsError
from vtensors.modules import Module
from vtensors.plugin_candidates import OWN_DISTRIBUTION
from vtensors.reading import TensorReader
from vtensors.verification.findings import Finding, finding, finding_of
from vtensors_formats import e2m1, e4m3
from vtensors_plugins.row_windows import RowWindows
from vtensors_plugins.verification.kinds import Kind, Subject
from vtensors_plugins.verification.scanning import Scan
from vtensors_plugins.verification.tallies import Fault, Tally
from vtensors_plugins.verification.zero_scales import zero_scales

# The largest code times the largest block scale.
_NVFP4_CODES = e2m1.MAX * e4m3.MAX
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
        beyond = _beyond_float32(subject, tally)
        if beyond is not None:
            yield finding("scale-out-of-range", subject.info.name, seen=beyond)
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
    word = "NaN or infinite" if fault.count > 1 and not math.isfinite(fault.value) else repr(fault.value)
    share = f"{fault.count:,} of {counted(total, 'value')} {agreeing(fault.count, 'is', 'are')}"
    return f"{share} {word}; the first at {index}: {fault.value!r}"


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
                seen=f"{counted(found.count, 'zero scale')}{where} over codes that are not; the first at "
                f"{list(found.first)}",
            )


def _is_shared(module: Module) -> bool:
    return module.claim.part is not None


def _beyond_float32(subject: Subject, tally: Tally) -> str | None:
    """The scale that makes the largest code infinite, None where float32 holds every product."""
    most = torch.finfo(torch.float32).max
    if subject.role == "global_divisor":
        return f"{tally.low!r}, which divides" if 0 < tally.low < _NVFP4_CODES / most else None
    largest = {"global_scale": _NVFP4_CODES, "scale": e4m3.MAX}.get(subject.role)
    return f"{tally.high!r}, which multiplies" if largest and tally.high > most / largest else None


def _is_all_zero(subject: Subject, tally: Tally) -> bool:
    info = subject.info
    is_matrix = subject.role == "codes" and len(info.shape) > 1
    return is_matrix and subject.kind in _CODES and not tally.nonzero and info.nbytes > 0
