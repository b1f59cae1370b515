"""Which kernels compute a request: one for each range of rows M, or the parts of a fused op instead.

    plan = plan_kernels(request, kernels, rules, decompose=decomposer(decompositions))
    plan.segments          # (1..32: linear_nvfp4_stream), (33..64: linear_nvfp4_wgmma), ...; () where decomposed
    plan.rejected          # (kernel, reason) of those that serve nowhere

Planning reads no weight and launches nothing; `vtensors.kernel_binding` binds what was planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import attrs

from vtensors.kernel_candidates import (
    Candidate,
    CostOf,
    Pool,
    Rejected,
    Rows,
    candidates_for,
    cost_in_words,
    covers,
    forced_kernels,
    no_kernel,
    standing_reason,
)
from vtensors.kernel_plans import STEP_COSTS, Decompose, KernelPlan, Segment, decomposer
from vtensors.kernel_rules import NO_RULES, KernelRules
from vtensors.kernel_targets import tell_unknown
from vtensors.records import KernelRequest, KernelSpec

__all__ = ["KernelPlan", "Segment", "decomposer", "plan_kernels", "replan"]

# A request that nothing serves, and why each kernel does not.
_Unserved = tuple[KernelRequest, Rejected]

# Two costs below this are alike: a plain number 0 in a plugin means "first", not infinitely faster.
_LEAST_COST = 1e-3
# Steps of one kind in a row that a reason lists; more, as a mixture has, are counted.
_TOLD_ONE_BY_ONE = 3
# Up to so many rows a row's bits must not depend on how many there are, where the kernel of one row promises it.
INVARIANT_ROWS = 32


def plan_kernels(
    request: KernelRequest,
    kernels: Sequence[KernelSpec],
    rules: KernelRules = NO_RULES,
    *,
    cost_of: CostOf | None = None,
    decompose: Decompose | None = None,
) -> KernelPlan:
    """The plan for every M of request.tokens.

    In each range of rows the cheapest kernel wins; among equal ones the one made more exactly for the device,
    then the first by name. The kernel of the fewest rows decides the prepared layout: later a kernel of another
    layout is taken only where there is no other, and up to 32 rows one that would change a row's bits. A fused op is
    computed whole where that is no dearer than its parts (geometric mean over the ranges).
    rules: `VT_KERNELS`. cost_of: measured costs. decompose: request -> requests that together compute the same.
    Errors: VtensorsError listing every candidate with its reason, where nothing serves some M.
    """
    tell_unknown(request.capability)
    return _plan_or_raise(request, Pool(kernels=kernels, rules=rules, cost_of=cost_of), decompose)


def replan(plan: KernelPlan, failed: Mapping[str, str]) -> KernelPlan:
    """The plan anew without the kernels named (kernel -> reason). Errors: as `plan_kernels`."""
    pool = attrs.evolve(plan.pool, failed={**plan.pool.failed, **failed})
    return _plan_or_raise(plan.request, pool, plan.decompose)


def _plan_or_raise(request: KernelRequest, pool: Pool, decompose: Decompose | None) -> KernelPlan:
    plan = _plan(request, pool, decompose)
    if isinstance(plan, tuple):
        raise no_kernel(*plan, pool)
    return plan


def _plan(request: KernelRequest, pool: Pool, decompose: Decompose | None) -> KernelPlan | _Unserved:
    """The plan, or the request that nothing serves with the reasons."""
    steps = tuple(decompose(request)) if decompose is not None else ()
    whole = _whole(request, pool, decompose)
    if not steps:
        return whole
    # The parts of a mixture are hundreds of a few kinds.
    kinds = dict.fromkeys(step for step in steps if step.op not in STEP_COSTS)
    planned = {step: _plan(step, pool, decompose) for step in kinds}
    plans = [planned[step] for step in steps if step.op not in STEP_COSTS]
    parts = [plan for plan in plans if isinstance(plan, KernelPlan)]
    unserved = next((plan for plan in plans if isinstance(plan, tuple)), None)
    if unserved is not None:
        if isinstance(whole, KernelPlan):
            return whole
        return unserved[0], (*whole[1], *unserved[1])
    apart = KernelPlan(
        request=request,
        steps=tuple(step.op for step in steps),
        parts=tuple(parts),
        pool=pool,
        decompose=decompose,
    )
    if isinstance(whole, tuple):
        return attrs.evolve(apart, rejected=whole[1])
    dearer = _why_apart(whole, apart)
    if dearer is None:
        return whole
    names = dict.fromkeys(segment.kernel.name for segment in whole.segments)
    return attrs.evolve(apart, rejected=(*((name, dearer) for name in names), *whole.rejected))


def _whole(request: KernelRequest, pool: Pool, decompose: Decompose | None) -> KernelPlan | _Unserved:
    related = _related(request, pool, decompose)
    segments: list[Segment] = []
    layouts: set[str] = set()
    for tokens in _ranges(request, pool, related):
        part = attrs.evolve(request, tokens=tokens)
        candidates, rejected = candidates_for(part, pool, related)
        if segments:
            candidates, lost = _in_layouts(candidates, layouts)
            rejected += lost
        if segments and tokens[1] is not None and tokens[1] <= INVARIANT_ROWS:
            candidates, lost = _in_order(candidates, segments[0].kernel.sums, tokens[0])
            rejected += lost
        if not candidates:
            return part, _first_reasons([*(s.rejected for s in segments), rejected])
        # A weight that another op reads as stored is kept so in any case.
        layouts |= {candidates[0].kernel.layout, *(("stored",) if "shared" in request.traits else ())}
        new = Segment(tokens=tokens, candidates=candidates, rejected=rejected)
        segments = _appended(segments, new, related)
    serving = {segment.kernel.name for segment in segments}
    reasons = _first_reasons([segment.rejected for segment in segments])
    return KernelPlan(
        request=request,
        segments=tuple(segments),
        rejected=tuple((name, reason) for name, reason in reasons if name not in serving),
        pool=pool,
        decompose=decompose,
    )


def _in_layouts(
    candidates: tuple[Candidate, ...], layouts: set[str]
) -> tuple[tuple[Candidate, ...], Rejected]:
    """Those that read what is kept already, and why the others lost; all where none does."""
    fitting = tuple(c for c in candidates if c.kernel.layout in layouts)
    if not fitting:
        return candidates, ()
    kept = " and ".join(sorted(layouts))
    return fitting, tuple(
        (c.kernel.name, f"would keep the weight twice: {c.kernel.layout} beside {kept}")
        for c in candidates
        if c not in fitting
    )


def _in_order(
    candidates: tuple[Candidate, ...], order: str, first: int
) -> tuple[tuple[Candidate, ...], Rejected]:
    """Those that add in the order of the rows before `first`, and why the others lost; all where none does."""
    fitting = tuple(c for c in candidates if c.kernel.sums == order)
    if not order or not fitting:
        return candidates, ()
    reason = f"would change a row's bits between {first - 1} and {first} rows"
    return fitting, tuple((c.kernel.name, reason) for c in candidates if c not in fitting)


def _ranges(request: KernelRequest, pool: Pool, related: Sequence[KernelSpec]) -> list[Rows]:
    """request.tokens cut where a kernel that may serve, or that the user asks for, begins or ends."""
    forced = {kernel.name for _, kernel in forced_kernels(request, pool, related)}
    first, last = request.tokens
    starts = {first}
    for kernel in related:
        own = kernel.op == request.op and standing_reason(kernel, request, pool) is None
        if own or kernel.name in forced:
            starts.add(kernel.tokens[0])
            starts |= set() if kernel.tokens[1] is None else {kernel.tokens[1] + 1}
    end = math.inf if last is None else last
    inside = sorted(start for start in starts if first <= start <= end)
    return [*((start, following - 1) for start, following in pairwise(inside)), (inside[-1], last)]


def _related(request: KernelRequest, pool: Pool, decompose: Decompose | None) -> list[KernelSpec]:
    """The kernels of the op and of everything it decomposes into."""
    ops: set[str] = set()
    waiting = [request]
    while waiting:
        asked = waiting.pop()
        if asked.op not in ops:
            ops.add(asked.op)
            waiting += decompose(asked) if decompose is not None else ()
    return [kernel for kernel in pool.kernels if kernel.op in ops]


def _appended(segments: list[Segment], new: Segment, related: Sequence[KernelSpec]) -> list[Segment]:
    """The segments with one more, joined to the last one where both have the same kernel.

    What a kernel lost by where it serves the rows is told before that it does not serve the others.
    """
    if not segments or segments[-1].kernel is not new.kernel:
        return [*segments, new]
    last = segments[-1]
    in_both = {c.kernel.name for c in last.candidates} & {c.kernel.name for c in new.candidates}
    serving = [_lost_serving(part, related) for part in (last, new)]
    reasons = dict(_first_reasons([*serving, last.lost, new.lost]))
    names = dict.fromkeys(name for name, _ in (*last.rejected, *new.rejected))
    joined = Segment(
        tokens=(last.tokens[0], new.tokens[1]),
        candidates=tuple(c for c in last.candidates if c.kernel.name in in_both),
        rejected=tuple((name, reasons[name]) for name in names if name not in in_both),
    )
    return [*segments[:-1], joined]


def _lost_serving(segment: Segment, related: Sequence[KernelSpec]) -> Rejected:
    """segment.lost of the kernels that serve its rows."""
    serving = {kernel.name for kernel in related if covers(kernel.tokens, segment.tokens)}
    return tuple(entry for entry in segment.lost if entry[0] in serving)


def _why_apart(whole: KernelPlan, apart: KernelPlan) -> str | None:
    """Why the parts are taken instead of the whole, or None where the whole is no dearer."""
    starts = sorted(whole.starts() | apart.starts())
    costs = [(max(whole.cost_at(m), _LEAST_COST), max(apart.cost_at(m), _LEAST_COST)) for m in starts]
    if sum(math.log(a) for a, _ in costs) <= sum(math.log(b) for _, b in costs):
        return None
    rows, (one, several) = max(zip(starts, costs, strict=True), key=lambda entry: entry[1][0] / entry[1][1])
    how = " (modelled)" if whole.pool.cost_of is None else ""
    costs_told = f"{cost_in_words(one)}, these {cost_in_words(several)} at M = {rows}{how}"
    return f"dearer than {_steps_in_words(apart.steps)}: {costs_told}"


def _steps_in_words(steps: Sequence[str]) -> str:
    """`linear + add`; more than three alike in a row are counted: `24 x linear + swiglu`."""
    runs = [(step, len(list(alike))) for step, alike in groupby(steps)]
    return " + ".join(f"{n} x {step}" if n > _TOLD_ONE_BY_ONE else " + ".join([step] * n) for step, n in runs)


def _first_reasons(reasons: Sequence[Rejected]) -> Rejected:
    found: dict[str, str] = {}
    for name, reason in (entry for several in reasons for entry in several):
        found.setdefault(name, reason)
    return tuple(found.items())
