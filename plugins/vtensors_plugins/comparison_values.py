"""The weights of two checkpoints compared: bit for bit, in ULP where one stores a reciprocal, or dequantized.

Both are read window by window without a memory map, so memory stays bounded and a file that changes meanwhile
is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.checkpoint import Checkpoint
from vtensors.comparison import ModuleChanges
from vtensors.reading import TensorReader
from vtensors.records import Weight
from vtensors_formats import ActivationQuantizer
from vtensors_plugins.row_windows import RowWindows, common_windows
from vtensors_plugins.tensor_distance import Distance, ValueDistance

# Told how many stored bytes of both sides have been compared since the last call.
Advance = Callable[[int], None]


class Verdict(StrEnum):
    """What the values of one module, or of all of them, say."""

    SAME = "same bits"
    OTHER_CONVENTION = "same weights, other convention"
    SAME_VALUES = "same values, stored otherwise"
    OTHER_ACTIVATION = "same weights, other activation scales"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"


# From best to worst: the whole is as good as its worst module.
_ORDER = tuple(Verdict)
_BESIDE = ("bias", "pre_scale")
# Read whole with every window, so compared with the first alone.
_NOT_BY_ROW = ("pre_scale", "input_scale")


@attrs.frozen(kw_only=True)
class ModuleValues:
    """One module's result. distances: by stored tensor; dequantized: where these do not settle it.

    before, after: its name in either checkpoint. reason: why it was not compared.
    """

    before: str
    after: str
    verdict: Verdict
    distances: Mapping[str, Distance] = attrs.field(factory=dict)
    dequantized: ValueDistance | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """An entry of `values.modules`."""
        values = self.dequantized
        return {
            "module": self.before,
            "verdict": str(self.verdict),
            "tensors": {role: attrs.asdict(distance) for role, distance in self.distances.items()},
            "dequantized": None
            if values is None
            else {
                "elements": values.elements,
                "different": values.different,
                "max_ulp": values.max_ulp,
                "max_abs": values.max_abs,
                "snr_db": values.snr_db,
            },
            "reason": self.reason or None,
        }


@attrs.frozen(kw_only=True)
class ValueComparison:
    """All modules that both checkpoints hold. compared_bytes: stored bytes read of both sides."""

    modules: tuple[ModuleValues, ...]
    compared_bytes: int

    @property
    def verdict(self) -> Verdict:
        """The worst one of any module; `same bits` where there is none."""
        return max((module.verdict for module in self.modules), key=_ORDER.index, default=Verdict.SAME)

    @property
    def counts(self) -> dict[str, int]:
        """verdict -> modules, verdicts without modules left out."""
        found = {str(v): sum(module.verdict is v for module in self.modules) for v in _ORDER}
        return {verdict: count for verdict, count in found.items() if count}

    @property
    def reciprocal_ulp(self) -> int | None:
        """Greatest ULP between a multiplier and the reciprocal of a divisor where these count as the same."""
        found = [d.max_ulp for m in self.modules for d in m.distances.values() if d.reciprocal and d.same]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        """`values` of `diff --values --json`; modules with the same bits are only counted."""
        return {
            "verdict": str(self.verdict),
            "counts": self.counts,
            "reciprocal_max_ulp": self.reciprocal_ulp,
            "compared_bytes": self.compared_bytes,
            "modules": [m.to_json() for m in self.modules if m.verdict is not Verdict.SAME],
        }


def compare_values(
    before: Checkpoint, after: Checkpoint, changes: tuple[ModuleChanges, ModuleChanges], advance: Advance
) -> ValueComparison:
    """The weights of every matched module compared.

    changes: the header comparison's modules and KV scales. Errors: RequestError for a repository whose
    weights are not on this machine, CheckpointError for a file that changed, and what conventions refuse.
    """
    found: list[ModuleValues] = []
    compared = 0
    with (
        TensorReader(before.snapshot, mmap=False) as first,
        TensorReader(after.snapshot, mmap=False) as second,
    ):
        for name, other in changes[0].pairs:
            if name not in before.modules or other not in after.modules:
                reason = "no convention reads it"
                found.append(_not_compared(name, other, reason))
                continue
            one, two = RowWindows.of(before, name, first), RowWindows.of(after, other, second)
            found.append(_compare_module(one, two))
            size = one.module.nbytes + two.module.nbytes
            compared += size
            advance(size)
    found.extend(_compare_kv_scales(before, after, changes[1]))
    return ValueComparison(modules=tuple(found), compared_bytes=compared)


def total_bytes(before: Checkpoint, after: Checkpoint, changes: ModuleChanges) -> int:
    """Stored bytes that `compare_values` goes through, for a progress bar."""
    return sum(
        before.modules[name].nbytes + after.modules[other].nbytes
        for name, other in changes.pairs
        if name in before.modules and other in after.modules
    )


# --- one module -------------------------------------------------------------------------------------------


def _compare_module(one: RowWindows, two: RowWindows) -> ModuleValues:
    name, other = one.module.name, two.module.name
    if one.module.shape != two.module.shape:
        shapes = f"shapes {list(one.module.shape)} and {list(two.module.shape)}"
        return _not_compared(name, other, shapes)
    distances: dict[str, Distance] = {}
    settled = one.module.scheme == two.module.scheme
    if settled:
        settled = all(
            _add_stored(distances, one.read(*rows), two.read(*rows), first=rows[0] == 0)
            for rows in common_windows(one, two)
        )
    differing = {role for role, distance in distances.items() if not distance.same}
    if settled and differing <= {"input_scale"}:
        reciprocal = any(distance.reciprocal for distance in distances.values())
        verdict = Verdict.SAME
        if differing:
            verdict = Verdict.OTHER_ACTIVATION
        elif reciprocal or one.module.convention != two.module.convention:
            verdict = Verdict.OTHER_CONVENTION
        return ModuleValues(before=name, after=other, verdict=verdict, distances=distances)
    return _compare_dequantized(one, two, distances)


def _compare_dequantized(one: RowWindows, two: RowWindows, stored: Mapping[str, Distance]) -> ModuleValues:
    values = ValueDistance()
    beside: dict[str, Distance] = {}
    alike = True
    for start, stop in common_windows(one, two):
        left, right = one.read(start, stop), two.read(start, stop)
        values.add(left.dequantize(torch.float32), right.dequantize(torch.float32))
        alike &= _add_beside(beside, left, right, first=start == 0)
    same = alike and values.different == 0 and all(distance.same for distance in beside.values())
    return ModuleValues(
        before=one.module.name,
        after=two.module.name,
        verdict=Verdict.SAME_VALUES if same else Verdict.DIFFERENT,
        distances={**stored, **beside},
        dequantized=values,
    )


def _add_beside(distances: dict[str, Distance], one: Weight, two: Weight, *, first: bool) -> bool:
    """Add bias and pre-scale, which `dequantize` leaves out; False where only one side has them."""
    left, right = _stored(one), _stored(two)
    for role in _BESIDE:
        if (role in left) != (role in right):
            return False
        if role in left and (first or role not in _NOT_BY_ROW):
            distances.setdefault(role, Distance()).add(left[role][0], right[role][0])
    return True


def _add_stored(distances: dict[str, Distance], one: Weight, two: Weight, *, first: bool) -> bool:
    """Add the stored tensors of one window; False where the two cannot be compared tensor by tensor."""
    left, right = _stored(one), _stored(two)
    if ("input_scale" in left) != ("input_scale" in right):
        # Only one side keeps it: a difference of the headers, not of the weights.
        left.pop("input_scale", None)
        right.pop("input_scale", None)
    if left.keys() != right.keys() or not left:
        return False
    for role, (a, divides) in left.items():
        b, other_divides = right[role]
        if a.numel() == b.numel() == 1:
            a, b = a.reshape(()), b.reshape(())
        if a.shape != b.shape:
            return False
        if not first and (a.ndim == 0 or role in _NOT_BY_ROW):
            continue
        distance = distances.setdefault(role, Distance())
        if divides == other_divides:
            distance.add(a, b)
        elif divides:
            distance.add_reciprocal(b, a)
        else:
            distance.add_reciprocal(a, b)
    return True


def _stored(weight: Weight) -> dict[str, tuple[Tensor, bool]]:
    """role -> (tensor, whether it divides) of a canonical weight that is an attrs class, else nothing."""
    kind: type = type(weight)
    if not attrs.has(kind):
        return {}
    found: dict[str, tuple[Tensor, bool]] = {}
    for field in attrs.fields(kind):
        value = getattr(weight, field.name)
        if isinstance(value, Tensor):
            found[field.name.replace("_divisor", "_scale")] = (value, field.name.endswith("_divisor"))
        elif isinstance(value, ActivationQuantizer):
            for inner in attrs.fields(type(value)):
                scale = getattr(value, inner.name)
                if isinstance(scale, Tensor):
                    found["input_scale"] = (scale, inner.name.endswith("_divisor"))
    return found


def _not_compared(name: str, other: str, reason: str) -> ModuleValues:
    return ModuleValues(before=name, after=other, verdict=Verdict.NOT_COMPARED, reason=reason)


# --- KV-cache scales --------------------------------------------------------------------------------------


def _compare_kv_scales(before: Checkpoint, after: Checkpoint, changes: ModuleChanges) -> list[ModuleValues]:
    if not changes.pairs:
        return []
    left, right = before.kv_scales(), after.kv_scales()
    found = []
    for name, other in changes.pairs:
        if name not in left or other not in right:
            continue
        distances = {what: Distance() for what in ("k", "v")}
        for what, distance in distances.items():
            one, two = getattr(left[name], what), getattr(right[other], what)
            distance.add(torch.tensor(one, dtype=torch.float32), torch.tensor(two, dtype=torch.float32))
        same = all(distance.same for distance in distances.values())
        verdict = Verdict.SAME if same else Verdict.DIFFERENT
        label = "KV-cache scales of "
        found.append(
            ModuleValues(before=label + name, after=label + other, verdict=verdict, distances=distances)
        )
    return found
