"""`VT_AUTOTUNE=1`: candidates are timed on this card once, and the times are kept beside the verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import RequestError
from vtensors.kernel_candidates import told
from vtensors.kernel_entries import EntryFolder
from vtensors.records import KernelRequest, KernelSpec
from vtensors.verdicts import Verdicts

FOLDER = "timings"
# (kernel, request) -> median microseconds of the bound kernel at request.tokens[0] rows, on a weight of the caller.
Measure = Callable[[KernelSpec, KernelRequest], float]


@attrs.define(kw_only=True)
class MeasuredCosts:
    """Times of kernels on one device.

    verdicts: of the same device; only what passes its self-test is timed. schemes: those of which the caller can make
    a weight to time with, None = any.
    """

    verdicts: Verdicts
    measure: Measure
    schemes: frozenset[str] | None = None
    _known: dict[tuple[str, KernelRequest], float | str] = attrs.field(factory=dict, init=False)

    def cost_of(self, kernel: KernelSpec, request: KernelRequest) -> float | str | None:
        """Median microseconds at request.tokens[0] rows, measured now or before.

        None for a reference kernel, without a shape and for a scheme that cannot be timed; the reason for a kernel
        that fails its self-test or while it is timed. Errors: RequestError inside of a graph capture.
        """
        if kernel.numerics == "reference" or request.shape is None:
            return None
        if self.schemes is not None and request.scheme not in self.schemes:
            return None
        asked = (kernel.name, request)
        if asked not in self._known:
            self._known[asked] = self._time(kernel, request)
        return self._known[asked]

    def _time(self, kernel: KernelSpec, request: KernelRequest) -> float | str:
        failure = self.verdicts.failure(kernel, request)
        if failure is not None:
            return failure
        try:
            place = self.verdicts.entry(kernel, request, FOLDER)
        except PLUGIN_FAILURES as problem:
            return f"failed to say what its time depends on: {told(problem)}"
        kept = None if place is None else _kept(*place)
        if kept is not None:
            return kept
        if self.verdicts.capturing():
            raise RequestError(
                f"the kernel '{kernel.name}' cannot be timed while a CUDA graph is captured",
                fix="bind every layer before the capture begins, or unset VT_AUTOTUNE",
            )
        try:
            value = float(self.measure(kernel, request))
        except PLUGIN_FAILURES as problem:
            return f"failed while it was timed: {told(problem)}"
        if not 0 < value < math.inf:
            return f"failed while it was timed: {value} microseconds"
        if place is not None:
            place[0].write(place[1], {"microseconds": value})
        return value


def _kept(folder: EntryFolder, key: str) -> float | None:
    fact = folder.read(key)
    value = None if fact is None else fact.get("microseconds")
    return value if isinstance(value, float) and 0 < value < math.inf else None
