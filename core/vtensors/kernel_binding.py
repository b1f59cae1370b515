"""Kernels put into their places: tested, given the weight in their layout, and joined over the ranges of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import index
from typing import Any

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import RequestError
from vtensors.kernel_candidates import Rejected, no_kernel, told
from vtensors.kernel_plans import KernelPlan, Segment
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import replan
from vtensors.verdicts import Verdicts

STORED = "stored"
Call = Callable[..., Any]


@attrs.frozen(kw_only=True)
class BoundKernel:
    """What a layer calls.

    segments: the kernels and their rows; empty where the parts compute the op. prepared_bytes: of the weight in
    every layout that is kept, the stored one included. rejected: (kernel, reason) of those that serve nowhere.
    plan: what was bound in the end; it differs from the one given where kernels failed. prepared: layout -> the weight
    in it, of every layout that is kept.
    """

    call: Call
    segments: tuple[Segment, ...]
    prepared_bytes: int
    rejected: Rejected
    plan: KernelPlan
    prepared: Mapping[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def kernel(self) -> KernelSpec | None:
        """The kernel of the fewest rows; None where the parts compute the op."""
        return self.segments[0].kernel if self.segments else None

    @property
    def decomposed(self) -> bool:
        """Whether the parts compute the op."""
        return not self.segments


def bind_plan(
    plan: KernelPlan,
    weights: Sequence[Any],
    verdicts: Verdicts | None = None,
    *,
    compose: Callable[[], Call] | None = None,
) -> BoundKernel:
    """The plan's kernels on these weights: one per part, in order.

    A kernel whose self-test, prepare or bind raises loses with its reason, and the request is planned again
    without it; so it falls to the next kernel, to another layout, or to the parts.
    compose: gives the callable made of the bound parts; called where the op is decomposed.
    Errors: VtensorsError listing every candidate with its reason, where none is left; RequestError where a
    kernel would have to be tested inside of a graph capture.
    """
    tests = Verdicts() if verdicts is None else verdicts
    prepared: dict[str, Any] = {STORED: weights[0] if len(weights) == 1 else tuple(weights)}
    while not plan.decomposed:
        calls: list[Call] = []
        for segment in plan.segments:
            bound = _bind(segment, plan.request, weights, prepared, tests)
            if isinstance(bound, str):
                plan = replan(plan, {segment.kernel.name: bound})
                break
            calls.append(bound)
        else:
            kept = {segment.kernel.layout: prepared[segment.kernel.layout] for segment in plan.segments}
            return BoundKernel(
                call=_joined(plan, calls),
                segments=plan.segments,
                prepared_bytes=sum(_nbytes(weight) for weight in kept.values()),
                rejected=plan.rejected,
                plan=plan,
                prepared=kept,
            )
    prepared.clear()
    if compose is None:
        raise no_kernel(plan.request, plan.rejected, plan.pool)
    return BoundKernel(call=compose(), segments=(), prepared_bytes=0, rejected=plan.rejected, plan=plan)


def prepare_weights(kernel: KernelSpec, weights: Sequence[Any], request: KernelRequest) -> Any:
    """The weights in the kernel's layout: what its `bind` is given. Errors: whatever its `prepare` raises."""
    if kernel.prepare is None or kernel.layout == STORED:
        return weights[0] if len(weights) == 1 else tuple(weights)
    return kernel.prepare(weights, request)


def _bind(
    segment: Segment,
    request: KernelRequest,
    weights: Sequence[Any],
    prepared: dict[str, Any],
    tests: Verdicts,
) -> Call | str:
    """The bound callable, or why there is none."""
    kernel = segment.kernel
    asked = attrs.evolve(request, tokens=segment.tokens)
    failure = tests.failure(kernel, asked)
    if failure is not None:
        return failure
    try:
        if kernel.layout not in prepared:
            made = prepare_weights(kernel, weights, asked)
            if made is None or _nbytes(made) < 0:
                said = "nothing" if made is None else f"a {type(made).__name__} of {made.nbytes} bytes"
                return f"failed to prepare: it gives {said}"
            prepared[kernel.layout] = made
    except PLUGIN_FAILURES as problem:
        return f"failed to prepare: {told(problem)}"
    try:
        call: object = kernel.bind(prepared[kernel.layout], asked)
    except PLUGIN_FAILURES as problem:
        return f"failed to bind: {told(problem)}"
    return call if callable(call) else f"failed to bind: it gives {call!r:.40}, not a function"


def _joined(plan: KernelPlan, calls: Sequence[Call]) -> Call:
    """One callable for all rows: the kernel's own where there is one range."""
    if len(calls) == 1:
        return calls[0]
    lasts = [segment.tokens[1] for segment in plan.segments]
    borders = [last for last in lasts if last is not None]
    # ids of an embedding are all rows; the last dimension of x is its features.
    features = 0 if plan.request.op == "embedding" else 1

    def call(x: Any, *rest: Any) -> Any:
        shape = x.shape
        rows = shape[0] if len(shape) == 1 + features else prod(shape[: len(shape) - features])
        index = bisect_left(borders, rows)
        if index == len(calls):
            raise RequestError(
                f"{plan.request.op} was bound for fewer rows",
                seen=f"{rows} rows",
                accepted=f"at most {borders[-1]}",
            )
        return calls[index](x, *rest)

    return call


def _nbytes(prepared: Any) -> int:
    """Bytes of a prepared weight, or of a tuple of stored ones; 0 where it does not tell."""
    if isinstance(prepared, tuple):
        return sum(_nbytes(weight) for weight in prepared)
    return index(getattr(prepared, "nbytes", 0))
