"""KV-cache scales under the target's names; none is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vtensors.checkpoint import Checkpoint
from vtensors.conversion.changes import WIDEN, is_all_zero
from vtensors.conversion.deciding import Target
from vtensors.conversion.layout import PlannedTensor
from vtensors.conversion.parts import StoredPart
from vtensors.conversion.units import Fate, Unit
from vtensors.errors import RequestError
from vtensors.grouping import group_tensors
from vtensors.modules import is_quantized
from vtensors.reading import TensorReader
from vtensors.records import Layout
from vtensors.tensors import TensorInfo


def kv_units(checkpoint: Checkpoint, target: Target) -> Iterator[Unit]:
    """One unit per attention module that has KV-cache scales. Raises RequestError naming a scale that the
    target cannot express."""
    owners = group_tensors(checkpoint.snapshot.tensors.values()).kv_scales
    writers = {m.convention for m in checkpoint.modules.values() if is_quantized(m.scheme)}
    rename = target.writer.kv_scale is not None and writers != {target.convention.name}
    for owner, scales in owners.items():
        yield _renamed(checkpoint, owner, scales, target) if rename else _kept(owner, scales)


def _part(info: TensorInfo) -> StoredPart:
    return StoredPart(
        info=info, layout=Layout(dtype=info.dtype, shape=info.shape), begin=info.begin, end=info.end
    )


def _kept(owner: str, scales: Mapping[str, TensorInfo]) -> Unit:
    return Unit(
        name=f"{owner} (KV-cache scales)",
        fate=Fate.KEPT,
        before="KV-cache scales",
        after="KV-cache scales",
        tensors=tuple(
            PlannedTensor(name=info.name, dtype=info.dtype, shape=info.shape, role=what)
            for what, info in scales.items()
        ),
        parts={what: _part(info) for what, info in scales.items()},
    )


def _renamed(checkpoint: Checkpoint, owner: str, scales: Mapping[str, TensorInfo], target: Target) -> Unit:
    tensors, left_out = [], []
    for what, info in scales.items():
        if what.endswith("zero_point"):
            _require_zero(checkpoint, info, target)
            left_out.append(f"{info.name}: a zero point of zero")
            continue
        if what.endswith("_bias"):
            raise RequestError(
                f"an affine KV cache cannot be written by {target.convention.name}",
                tensor=info.name,
                seen=info.describe(),
                accepted="symmetric KV-cache scales, without zero points",
                fix="choose another target for this checkpoint",
            )
        # One scale for both serves each of the two.
        for one in ("k", "v") if what == "kv" else (what,):
            if one in scales and what == "kv":
                continue
            tensors.append(_named(owner, one, what, info, target))
    words = "KV-cache scales"
    return Unit(
        name=f"{owner} ({words})",
        fate=Fate.RESPELLED,
        before=words,
        after=f"{words} ({target.convention.name})",
        tensors=tuple(tensors),
        parts={what: _part(info) for what, info in scales.items() if not what.endswith("zero_point")},
        left_out=tuple(left_out),
    )


def _named(owner: str, one: str, what: str, info: TensorInfo, target: Target) -> PlannedTensor:
    stored = Layout(dtype=info.dtype, shape=info.shape)
    if target.writer.kv_scale is None:
        return PlannedTensor(name=info.name, dtype=info.dtype, shape=info.shape, role=what)
    try:
        name, layout = target.writer.kv_scale(owner, one, stored)
    except RequestError as problem:
        raise _with_tensor(problem, info) from problem
    if layout.dtype != info.dtype and (layout.dtype != "F32" or info.dtype not in WIDEN):
        raise RequestError(
            "a KV-cache scale cannot be stored without rounding",
            tensor=info.name,
            seen=info.describe(),
            accepted="a scale that the target's dtype holds exactly",
            fix="choose another target for this checkpoint",
        )
    change = WIDEN[info.dtype] if layout.dtype != info.dtype else None
    return PlannedTensor(name=name, dtype=layout.dtype, shape=layout.shape, role=what, change=change)


def _with_tensor(problem: RequestError, info: TensorInfo) -> RequestError:
    """The writer's refusal with the stored tensor's name and description."""
    return RequestError(
        problem.problem,
        tensor=info.name,
        seen=info.describe(),
        accepted=problem.accepted,
        fix=problem.fix,
    )


def _require_zero(checkpoint: Checkpoint, info: TensorInfo, target: Target) -> None:
    with TensorReader(checkpoint.snapshot, mmap=False) as reader:
        zero = is_all_zero(bytes(reader.read_copy(info)), info.dtype)
    if not zero:
        raise RequestError(
            f"{target.convention.name} has no zero points for the KV cache",
            tensor=info.name,
            seen=f"{info.describe()}, not zero",
            accepted="symmetric KV-cache scales",
            fix="choose another target for this checkpoint",
        )
