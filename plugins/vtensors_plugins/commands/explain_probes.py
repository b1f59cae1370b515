"""What `explain` does on a GPU that is here: planned kernels are tested as a load would test them, and timed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from vtensors.checkpoint import Checkpoint
from vtensors.containment import PLUGIN_FAILURES
from vtensors.kernel_candidates import covers, told
from vtensors.kernel_plans import KernelPlan
from vtensors.selection import replan
from vtensors.verdicts import Verdicts
from vtensors_kernels.compiling.launch import launching_on
from vtensors_kernels.self_tests import verdicts_for
from vtensors_kernels.timing import measure
from vtensors_plugins.architectures.groups import PlannedGroup
from vtensors_plugins.commands.explain_rows import ExplainRow

ROWS = (1, 8, 32, 64)


def probed(checkpoint: Checkpoint, groups: Sequence[PlannedGroup]) -> tuple[PlannedGroup, ...]:
    """The groups with plans of which every kernel passes its self-test; a group may fall into its parts.

    Errors: VtensorsError where no kernel is left.
    """
    if not groups:
        return ()
    device = torch.device(groups[0].request.device)
    verdicts = verdicts_for(checkpoint, device)
    if verdicts is None:
        return tuple(groups)
    tested: dict[KernelPlan, KernelPlan] = {}
    found: list[PlannedGroup] = []
    with launching_on(device):
        for group in groups:
            if group.plan not in tested:
                tested[group.plan] = _tested(group.plan, verdicts)
        plans = [tested[group.plan] for group in groups]
        for index, (group, plan) in enumerate(zip(groups, plans, strict=True)):
            found += _as_planned(_merging(group, plans[index:], verdicts), plan, verdicts)
    return tuple(found)


def row_times(row: ExplainRow, checkpoint: Checkpoint) -> dict[int, float | str]:
    """M = 1, 8, 32, 64 -> median microseconds of the kernel chosen for it, or why it cannot be timed."""
    kernels = checkpoint.plugins.registry.kernels
    times: dict[int, float | str] = {}
    for rows in ROWS:
        segment = next((s for s in row.segments if covers(s.tokens, (rows, rows))), None)
        if segment is None:
            continue
        request = attrs.evolve(row.request, tokens=(rows, segment.tokens[1]))
        try:
            times[rows] = measure(kernels[segment.kernel].record, request)
        except PLUGIN_FAILURES as problem:
            times[rows] = f"not timed: {told(problem)}"
    return times


def _tested(plan: KernelPlan, verdicts: Verdicts) -> KernelPlan:
    """The plan, made anew without each kernel that fails."""
    while True:
        for segment in plan.segments:
            request = attrs.evolve(plan.request, tokens=segment.tokens)
            failure = verdicts.failure(segment.kernel, request)
            if failure is not None:
                plan = replan(plan, {segment.kernel.name: failure})
                break
        else:
            return plan


def _merging(group: PlannedGroup, plans: Sequence[KernelPlan], verdicts: Verdicts) -> PlannedGroup:
    """The group with what merges it with what lies around for these plans, of it and of those behind, if that works."""
    if group.merged is None:
        return group
    merged = group.merged.again(plans[: 1 + group.merged.behind])
    why = None if merged is None else merged.failure(verdicts.run)
    if merged is None or why is None:
        return attrs.evolve(group, merged=merged)
    return attrs.evolve(group, merged=None, not_fused=(*group.not_fused, (merged.kernel, why)))


def _as_planned(group: PlannedGroup, plan: KernelPlan, verdicts: Verdicts) -> list[PlannedGroup]:
    """The group with that plan, or its parts where the plan says so."""
    if not plan.decomposed:
        return [attrs.evolve(group, plan=plan, request=plan.request)]
    why = (*group.not_fused, *plan.rejected)
    apart = len(plan.parts) == len(group.modules) > 1
    names: list[tuple[str, ...]] = [(name,) for name in group.modules]
    parts = list(zip(plan.parts, names if apart else [group.modules] * len(plan.parts), strict=True))
    shares = max(1, sum(sum(part.request.parts) for part, _ in parts))
    found: list[PlannedGroup] = []
    for part, modules in parts:
        share = group.nbytes * sum(part.request.parts) // shares if len(parts) > 1 else group.nbytes
        own = attrs.evolve(
            group, modules=modules, plan=part, request=part.request, not_fused=why, nbytes=share
        )
        found += _as_planned(own, _tested(part, verdicts), verdicts)
    return found
