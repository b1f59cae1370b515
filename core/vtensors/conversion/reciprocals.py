"""What taking reciprocals of global scales costs, found out before any work."""

from __future__ import annotations

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.conversion.changes import reciprocal_float32, ulps_after_two_reciprocals
from vtensors.conversion.planning import ConversionPlan
from vtensors.conversion.reading import read_part
from vtensors.conversion.writing import changed
from vtensors.reading import TensorReader


@attrs.frozen(kw_only=True)
class Reciprocals:
    """scalars: values that become their reciprocal. exact: of these, how many come back when it is taken twice.
    largest_ulps: how far the others are off then, in units of the last place."""

    scalars: int = 0
    exact: int = 0
    largest_ulps: int = 0


def count_reciprocals(checkpoint: Checkpoint, plan: ConversionPlan) -> Reciprocals:
    """The figures of a plan; only the scalars themselves are read.

    Raises WeightValueError, naming the tensor, for a value without a reciprocal. Of a remote checkpoint only
    the number is known.
    """
    places = [
        (tensor, unit.parts[tensor.role])
        for unit in plan.units
        for tensor in unit.tensors
        if tensor.change is reciprocal_float32 and tensor.role in unit.parts
    ]
    if checkpoint.snapshot.root is None:
        return Reciprocals(scalars=len(places))
    exact, largest = 0, 0
    with TensorReader(checkpoint.snapshot, mmap=False) as reader:
        for tensor, part in places:
            data = bytes(read_part(reader, part))
            changed(tensor, data, part.info.name)
            ulps = ulps_after_two_reciprocals(data)
            exact += ulps == 0
            largest = max(largest, ulps)
    return Reciprocals(scalars=len(places), exact=exact, largest_ulps=largest)
