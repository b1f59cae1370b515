"""Every weight against a reference: cosine, signal-to-noise ratio, largest error, worst blocks, a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import torch

from vtensors.checkpoint import Checkpoint
from vtensors.errors import RequestError, VtensorsError
from vtensors.modules import Module, is_quantized
from vtensors.reading import TensorReader
from vtensors.verification.findings import Finding, finding, finding_of
from vtensors.verification.opening import Opened
from vtensors_formats import Weight
from vtensors_plugins.row_windows import RowWindows
from vtensors_plugins.verification.differences import Differences
from vtensors_plugins.verification.pairing import Pair, pair_modules
from vtensors_plugins.verification.reach import MARGIN_DB, reach_db
from vtensors_plugins.verification.report import ProgressBar
from vtensors_plugins.verification.scanning import thread_count

# Below it a weight is another one: NVFP4 rounding gives 0.995 (20 dB), a wrong order of codes about 0.
LEAST_COSINE = 0.95
# A wrong constant factor leaves the cosine alone; at 6 dB half of the amplitude is wrong.
LEAST_DB = 6.0
_WINDOW_ROWS = 128
_WINDOW_ELEMENTS = 1 << 20
# Each holds some copies of a window in float32, 80 MB together.
_MOST_THREADS = 4


@attrs.frozen(kw_only=True)
class Compared:
    """One weight: what differs, the ratio that its scheme reaches on the reference (None: exact or unknown)."""

    pair: Pair
    differences: Differences
    reach: float | None

    @property
    def verdict(self) -> str:
        """`exact`, `as good as <scheme>`, or the code of a finding."""
        snr = self.differences.snr_db
        if snr is None:
            return "exact"
        if self.differences.cosine < LEAST_COSINE or snr < LEAST_DB or math.isnan(snr):
            return "different-weight"
        if not is_quantized(self.pair.module.scheme):
            return "plain-differs"
        if self.reach is not None and snr < self.reach - MARGIN_DB:
            return "worse-than-scheme"
        return f"as good as {self.pair.module.scheme}"

    def to_json(self) -> dict[str, Any]:
        """The comparison as `verify --against --json` prints it."""
        found = self.differences
        return {
            "module": self.pair.module.name,
            "reference": self.pair.other.name,
            "scheme": self.pair.module.scheme,
            "cosine": found.cosine,
            "snr_db": found.snr_db,
            "max_abs_error": found.max_abs,
            "reach_db": self.reach,
            "worst_blocks": [
                {"rows": list(b.rows), "columns": list(b.columns), "snr_db": b.snr_db} for b in found.worst
            ],
            "verdict": self.verdict,
        }


def compare(
    opened: Opened, reference: Opened, bar: ProgressBar
) -> tuple[list[Finding], tuple[dict[str, Any], ...]]:
    """Findings about weights that differ or are missing, and the figures of every weight, worst first."""
    if opened.checkpoint is None or reference.checkpoint is None:
        raise RequestError(
            "there is nothing to compare: no header could be read",
            seen="no checkpoint",
            accepted="two checkpoints whose headers can be read",
            fix="verify each by itself first",
        )
    ours, theirs = opened.checkpoint, reference.checkpoint
    pairing = pair_modules(ours, theirs)
    findings = [finding("missing-here", m.name, seen=_shown(m)) for m in pairing.missing_here]
    findings += [finding("missing-there", m.name, seen=_shown(m)) for m in pairing.missing_there]
    findings += [
        finding("shape-differs", a.name, seen=_shown(a), expected=f"{_shown(b)}, as {b.name} has it")
        for a, b in pairing.misfits
    ]
    compared: list[Compared] = []
    total = sum(pair.module.nbytes for pair in pairing.pairs)
    with (
        TensorReader(ours.snapshot, mmap=False) as here,
        TensorReader(theirs.snapshot, mmap=False) as there,
        bar("compare", total) as progress,
        ThreadPoolExecutor(max_workers=min(_MOST_THREADS, thread_count())) as pool,
    ):
        work = _Work(ours=ours, theirs=theirs, here=here, there=there, progress=progress)
        for outcome in pool.map(work.compare, pairing.pairs):
            if isinstance(outcome, Finding):
                findings.append(outcome)
            else:
                compared.append(outcome)
                findings += _findings(outcome)
    compared.sort(key=lambda c: math.inf if c.differences.snr_db is None else c.differences.snr_db)
    return findings, tuple(one.to_json() for one in compared)


@attrs.frozen(kw_only=True)
class _Work:
    ours: Checkpoint
    theirs: Checkpoint
    here: TensorReader
    there: TensorReader
    progress: Callable[[int], None]

    def compare(self, pair: Pair) -> Compared | Finding:
        """One pair, window by window; a finding where its values cannot be read."""
        try:
            return self._compare(pair)
        except VtensorsError as problem:
            return finding_of("unreadable-tensor", problem, tensor=pair.module.name)
        finally:
            self.progress(pair.module.nbytes)

    def _compare(self, pair: Pair) -> Compared:
        left = RowWindows.of(self.ours, pair.module.name, self.here)
        right = RowWindows.of(self.theirs, pair.other.name, self.there)
        differences = Differences(columns=pair.module.shape[1] if len(pair.module.shape) == 2 else 0)
        reach: list[float] = []
        declared = pair.module.declared_scheme
        block = declared.block if declared is not None and declared.block else (128, 128)
        for start, stop in _windows(pair, left, right):
            ours = _values(left, pair.here + start, pair.here + stop)
            theirs = _values(right, pair.there + start, pair.there + stop)
            differences.add(start, ours, theirs)
            # The first, middle or last rows may be special; each window's own limit counts.
            if is_quantized(pair.module.scheme):
                limit = reach_db(pair.module.scheme, theirs[:_WINDOW_ROWS], block)
                reach.extend([limit] if limit is not None else [])
        return Compared(pair=pair, differences=differences, reach=min(reach) if reach else None)


def _windows(pair: Pair, left: RowWindows, right: RowWindows) -> list[tuple[int, int]]:
    stacked = left.module.claim.part is not None or right.module.claim.part is not None
    if stacked or not pair.module.shape:
        return [(0, pair.rows)]
    width = max(1, math.prod(pair.module.shape[1:]))
    step = math.lcm(left.align, right.align, _WINDOW_ROWS)
    step = max(step, _WINDOW_ELEMENTS // width // step * step)
    return [(start, min(start + step, pair.rows)) for start in range(0, pair.rows, step)]


def _values(windows: RowWindows, start: int, stop: int) -> torch.Tensor:
    """float32 rows start..stop as they act: with the activation's pre-scale, if there is one."""
    first = start // windows.align * windows.align
    weight = windows.read(first, stop)
    if not windows.module.shape:
        return weight.dequantize(torch.float32)
    if windows.module.claim.part is not None:
        weight = weight.rows(start, stop)
    else:
        weight = weight.rows(start - first, stop - first)
    values = weight.dequantize(torch.float32)
    pre_scale = weight.pre_scale if isinstance(weight, Weight) else None
    return values if pre_scale is None else values * pre_scale.to(torch.float32)


def _findings(compared: Compared) -> list[Finding]:
    verdict, found = compared.verdict, compared.differences
    if verdict not in ("different-weight", "worse-than-scheme", "plain-differs"):
        return []
    worst = ", ".join(b.shown() for b in found.worst)
    ratio = f"{found.snr_db:.2f} dB" if found.snr_db is not None else "exact"
    limit = f"; {compared.pair.module.scheme} reaches {compared.reach:.2f} dB" if compared.reach else ""
    return [
        finding(
            verdict,
            compared.pair.module.claim.roles["codes"].name,
            seen=f"cosine {found.cosine:.6f}, {ratio}, largest error {found.max_abs:.4g}{limit}"
            + (f"; worst: {worst}" if worst else ""),
        )
    ]


def _shown(module: Module) -> str:
    return f"{module.scheme} {list(module.shape)}"
