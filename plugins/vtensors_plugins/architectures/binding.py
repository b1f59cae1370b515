"""From a group of weights to the callable of its kernel: request, plan, bind, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from vtensors.errors import VtensorsError
from vtensors.kernel_binding import BoundKernel, bind_plan
from vtensors.kernel_candidates import CostOf, Rejected
from vtensors.kernel_rules import KernelRules
from vtensors.records import KernelRequest, KernelSpec, Selected
from vtensors.selection import KernelPlan, decomposer, plan_kernels
from vtensors.verdicts import Verdicts
from vtensors_kernels.ops import OPS
from vtensors_plugins.architectures.fusing import (
    Part,
    assumptions,
    expert_traits,
    traits_of,
    why_apart,
    why_experts_apart,
)
from vtensors_plugins.architectures.groups import DryRun, Merged, PlannedGroup


@attrs.define(kw_only=True, eq=False)
class Group:
    """Weights that a layer asks for together. asked: the op. shared: another op uses a weight of them.

    not_fused: (op or kernel, reason), filled while one fused op after the other is tried.
    experts, chosen: of a mixture, whose parts are gate, up and down of each expert; else 0.
    """

    asked: str
    parts: tuple[Part, ...]
    shared: bool = False
    not_fused: Rejected = ()
    experts: int = 0
    chosen: int = 0

    @property
    def widths(self) -> list[int]:
        """Rows of each part."""
        return [part.weight.shape[0] for part in self.parts]

    def split(self) -> list[Group]:
        """One group per part."""
        return [attrs.evolve(self, parts=(part,)) for part in self.parts]


@attrs.define(kw_only=True, eq=False)
class Binder:
    """Plans and binds for one device and dtype; remembers plans and what was selected. Fields: `BuildOptions`."""

    kernels: Sequence[KernelSpec]
    rules: KernelRules
    cost_of: CostOf | None
    verdicts: Verdicts
    device: str
    capability: tuple[int, int] | None
    dtype: str
    dry_run: DryRun | None
    selected: list[Selected] = attrs.field(factory=list, init=False)
    _plans: dict[tuple[KernelRequest, ...], KernelPlan] = attrs.field(factory=dict, init=False)

    def whole(self, op: str, group: Group) -> Callable[..., Any] | None:
        """The call of a fused op as its contract says, or None where its steps are to be taken instead."""
        bound = self.bound(op, group)
        return None if bound is None else bound.call

    def bound(self, op: str, group: Group) -> BoundKernel | None:
        """`whole`, and the kernels behind it with the weights that they have prepared."""
        why = (why_experts_apart if op == "experts" else why_apart)(group.parts)
        if why is None and op.endswith("linear_swiglu") and len(set(group.widths)) > 1:
            why = f"gate and up have {' and '.join(map(str, group.widths))} rows"
        if why is not None:
            group.not_fused += ((op, why),)
            return None
        plan = self._plan(op, group)
        if not plan.decomposed:
            if self.dry_run is not None:
                return self._noted(self.dry_run, plan, group)
            bound = bind_plan(plan, _weights(group), self.verdicts, compose=_apart)
            if not bound.decomposed:
                self._record(bound, group)
                return bound
            group.not_fused += bound.rejected
        else:
            group.not_fused += plan.rejected or ((op, "no kernel is registered for it"),)
        return None

    def plain(self, op: str, group: Group) -> Callable[..., Any]:
        """The call of an op that is not made of others. Raises VtensorsError where no kernel serves it."""
        plan = self._plan(op, group)
        if self.dry_run is not None:
            return self._noted(self.dry_run, plan, group).call
        bound = bind_plan(plan, _weights(group), self.verdicts)
        self._record(bound, group)
        return bound.call

    def merges(self, merged: Merged, parts: int) -> bool:
        """Records that a kernel computes the so many parts bound last but for `merged.behind` groups of one weight.

        False where that is only planned, and where the kernel fails its self-test, which is recorded instead.
        """
        behind = merged.behind
        if self.dry_run is not None:
            planned = self.dry_run.planned
            planned[-1 - behind] = attrs.evolve(planned[-1 - behind], merged=merged)
            return False
        why = merged.failure(self.verdicts.run)
        failed = () if why is None else ((merged.kernel, why),)
        own = slice(len(self.selected) - behind - parts, len(self.selected) - behind)
        self.selected[own] = [
            attrs.evolve(
                record,
                not_fused=record.not_fused + failed,
                merged=None if failed else (*merged.tokens, merged.kernel),
            )
            for record in self.selected[own]
        ]
        return not failed

    def _plan(self, op: str, group: Group) -> KernelPlan:
        request = self._request(op, group)
        parts = tuple(self._request("linear", part) for part in group.split())
        key = (request, *parts)
        if key not in self._plans:
            self._plans[key] = plan_kernels(
                request,
                self.kernels,
                self.rules,
                cost_of=self.cost_of,
                decompose=decomposer({known.name: known.decomposition for known in OPS}, parts),
            )
        return self._plans[key]

    def _request(self, op: str, group: Group) -> KernelRequest:
        first, rows, mixture = group.parts[0], group.widths, op == "experts"
        if mixture:
            rows = rows[:3]
        return KernelRequest(
            op=op,
            scheme=first.weight.scheme,
            activations=first.executed,
            device=self.device,
            capability=self.capability,
            dtype=self.dtype,
            shape=(sum(rows[:2] if mixture else rows), first.weight.shape[1]),
            parts=tuple(rows),
            traits=expert_traits(group.parts, group.experts)
            if mixture
            else traits_of(group.parts, shared=group.shared),
            experts=group.experts if mixture else 0,
            chosen=group.chosen if mixture else 0,
            assumed=self.dry_run is not None and self.dry_run.assumed,
        )

    def _noted(self, dry_run: DryRun, plan: KernelPlan, group: Group) -> BoundKernel:
        dry_run.planned.append(
            PlannedGroup(
                modules=tuple(part.name for part in group.parts),
                asked=group.asked,
                request=plan.request,
                plan=plan,
                declared=tuple(_declared(part) for part in group.parts),
                not_fused=group.not_fused,
                assumes=() if plan.request.op == "experts" else assumptions(group.parts),
                nbytes=sum(part.weight.nbytes for part in group.parts),
            )
        )
        return BoundKernel(
            call=_unbound, segments=plan.segments, prepared_bytes=0, rejected=plan.rejected, plan=plan
        )

    def _record(self, bound: BoundKernel, group: Group) -> None:
        kernels = tuple((*segment.tokens, segment.kernel.name) for segment in bound.segments)
        names = tuple(part.name for part in group.parts)
        for index, part in enumerate(group.parts):
            self.selected.append(
                Selected(
                    module=part.name,
                    op=bound.plan.request.op,
                    scheme=part.weight.scheme,
                    declared=_declared(part),
                    executed=part.executed,
                    kernel=kernels[0][2],
                    rejected=bound.rejected,
                    asked=group.asked,
                    kernels=kernels,
                    layout=bound.segments[0].kernel.layout,
                    prepared_bytes=0 if index else bound.prepared_bytes,
                    group=names,
                    not_fused=group.not_fused,
                )
            )


def _weights(group: Group) -> list[Any]:
    return [part.weight for part in group.parts]


def _declared(part: Part) -> str:
    return "16bit" if part.weight.activation is None else part.weight.activation.kind


def _apart() -> Callable[..., Any]:
    """Stands for a fused op whose steps the caller takes instead."""
    return _unbound


def _unbound(*_: object) -> Any:
    raise VtensorsError("nothing is bound here", fix="build the model for a device instead of a dry run")
