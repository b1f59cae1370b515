"""What an architecture's builder is given, and the parts it takes: bound linears and small tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import attrs
import torch
from torch import Tensor

from vtensors import records
from vtensors.errors import ArchitectureError
from vtensors.kernel_binding import BoundKernel
from vtensors.kernel_candidates import CostOf
from vtensors.kernel_rules import NO_RULES, KernelRules
from vtensors.records import KernelSpec, Selected
from vtensors.verdicts import Verdicts
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.experts import weighted_sum
from vtensors_kernels.reference.linear_add import add
from vtensors_kernels.reference.linear_argmax import argmax
from vtensors_kernels.reference.swiglu import swiglu
from vtensors_plugins.architectures.binding import Binder, Group
from vtensors_plugins.architectures.fusing import Part, why_experts_apart
from vtensors_plugins.architectures.groups import DryRun, Merged
from vtensors_plugins.architectures.models.norm import RMSNorm
from vtensors_plugins.architectures.scale_doubts import ScaleDoubts

LinearCall = Callable[[Tensor], Tensor]
"""x [M, K] -> [M, N]."""
LinearsCall = Callable[[Tensor], tuple[Tensor, ...]]
"""x [M, K] -> one [M, N_i] per weight."""
NormedCall = Callable[[Tensor, RMSNorm], Tensor]
"""h [M, K] and the norm that comes first -> [M, N]."""
NormedLinearsCall = Callable[[Tensor, RMSNorm], tuple[Tensor, ...]]
"""h [M, K] and the norm that comes first -> one [M, N_i] per weight."""
AddCall = Callable[[Tensor, Tensor], Tensor]
"""x [M, K], residual [M, N] -> [M, N]."""
ExpertsCall = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""x [M, K], chosen [M, top], router [M, top] float32, logits [M, 1] of the shared expert's weight, residual [M, K] ->
[M, K]."""
EmbeddingCall = Callable[[Tensor, torch.dtype], Tensor]
"""ids [T] int64 -> [T, K] in the dtype."""
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


@attrs.frozen(kw_only=True)
class BuildOptions:
    """How a model is to run.

    dtype: of activations and logits. kernels: those that may be selected; rules: what the user forces and
    forbids; cost_of: measured microseconds of a kernel, None = its own estimate; verdicts: of self-tests.
    executed: canonical weight name -> activation mode (`16bit`, `fp4`, `fp8-static`, `fp8-dynamic`); a weight
    that is not named runs with 16-bit activations.
    kv_quant: layer -> (k_scale, v_scale) of an FP8 E4M3 KV cache; None = the cache is in dtype.
    dry_run: plan for its device instead of binding; the model that comes out cannot run.
    debug_nan: `VT_DEBUG_NAN`: the model raises VtensorsError at the first part whose output is not finite.
    """

    dtype: torch.dtype
    device: torch.device | str
    kernels: Sequence[KernelSpec]
    executed: Mapping[str, str] = attrs.field(factory=dict)
    kv_quant: Mapping[int, tuple[float, float]] | None = None
    rules: KernelRules = NO_RULES
    cost_of: CostOf | None = None
    verdicts: Verdicts | None = None
    dry_run: DryRun | None = None
    debug_nan: bool = False


@attrs.define
class Parts:
    """Gives the builder the model's parts by canonical name and records which kernel each linear got.

    A fused op is asked for by its method. Where no fused kernel serves, or separate ones are cheaper, or the
    weights are not alike, what comes back computes the same in the steps of the op's decomposition.
    shared: names of weights that several ops use; they stay as stored and are taken once. Any other weight is
    taken from `weights` when it is asked for and not kept: what a kernel has prepared replaces it.
    """

    weights: Mapping[str, records.Weight]
    options: BuildOptions
    shared: frozenset[str] = frozenset()
    _binder: Binder = attrs.field(init=False)
    _kept: dict[str, Weight] = attrs.field(factory=dict, init=False)
    _doubts: ScaleDoubts = attrs.field(factory=ScaleDoubts, init=False)

    @_binder.default
    def _new_binder(self) -> Binder:
        own, dry = self.options, self.options.dry_run
        device = torch.device(own.device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return Binder(
            kernels=own.kernels,
            rules=own.rules,
            cost_of=own.cost_of,
            verdicts=own.verdicts or Verdicts(),
            device=dry.device if dry is not None else str(device),
            capability=dry.capability if dry is not None else capability,
            dtype=str(own.dtype).removeprefix("torch."),
            dry_run=dry,
        )

    @property
    def selected(self) -> list[Selected]:
        """The kernel of every weight so far."""
        return self._binder.selected

    def linear(self, name: str, *, bias: bool = False) -> LinearCall:
        """The bound linear of that weight.

        bias: whether config.json announces one. Raises ArchitectureError where the checkpoint differs,
        VtensorsError where no kernel serves the weight. So do the other methods.
        """
        return self._linear(self._group("linear", [name], bias=bias))

    def linears(self, names: Sequence[str], *, bias: bool = False) -> LinearsCall:
        """Several weights over one x, in order."""
        return self._linears(self._group("linears", names, bias=bias))

    def bound_linears(self, names: Sequence[str]) -> tuple[LinearsCall, BoundKernel | None]:
        """`linears`, and the kernels that compute all weights at once; None where each has its own."""
        group = self._group("linears", names)
        bound = self._binder.bound("linears", group)
        return (self._apart(group), None) if bound is None else (_split(bound.call, group), bound)

    def merges(self, merged: Merged, parts: int) -> bool:
        """Whether that kernel is to compute so many weights, asked for before `merged.behind` others one by one.

        False for a plan, which notes it, and where the kernel fails its self-test, which the weights' records tell.
        """
        return self._binder.merges(merged, parts)

    def norm_linears(self, names: Sequence[str], *, bias: bool = False) -> NormedLinearsCall:
        """Several weights over one x that goes through a norm first."""
        group = self._group("norm_linears", names, bias=bias)
        fused = self._binder.whole("norm_linears", group)
        if fused is None:
            apart = self._linears(group)
            return lambda h, norm: apart(norm(h))
        widths = group.widths
        return lambda h, norm: torch.split(fused(h, norm.gain, norm.eps), widths, dim=-1)

    def linear_swiglu(self, gate: str, up: str, *, bias: bool = False) -> LinearCall:
        """silu(gate(x)) * up(x)."""
        return self._linear_swiglu(self._group("linear_swiglu", [gate, up], bias=bias))

    def norm_linear_swiglu(self, gate: str, up: str, *, bias: bool = False) -> NormedCall:
        """silu(gate(x)) * up(x) of an x that goes through a norm first."""
        return self.bound_norm_linear_swiglu(gate, up, bias=bias)[0]

    def bound_norm_linear_swiglu(
        self, gate: str, up: str, *, bias: bool
    ) -> tuple[NormedCall, BoundKernel | None]:
        """`norm_linear_swiglu`, and the kernels that compute all of it; None where several do."""
        group = self._group("norm_linear_swiglu", [gate, up], bias=bias)
        bound = self._binder.bound("norm_linear_swiglu", group)
        if bound is None:
            apart = self._linear_swiglu(group)
            return (lambda h, norm: apart(norm(h))), None
        return (lambda h, norm: bound.call(h, norm.gain, norm.eps)), bound

    def linear_add(self, name: str, *, bias: bool = False) -> AddCall:
        """residual + linear(x)."""
        return self.bound_linear_add(name, bias=bias)[0]

    def bound_linear_add(self, name: str, *, bias: bool) -> tuple[AddCall, BoundKernel | None]:
        """`linear_add`, and the kernels that compute all of it; None where the sum is apart."""
        group = self._group("linear_add", [name], bias=bias)
        bound = self._binder.bound("linear_add", group)
        if bound is not None:
            return bound.call, bound
        linear = self._linear(group)
        return (lambda x, residual: add(residual, linear(x))), None

    def linear_argmax(self, name: str) -> LinearCall:
        """x [M, K] -> [M] int64, the index of the largest entry of linear(x)."""
        group = self._group("linear_argmax", [name])
        fused = self._binder.whole("linear_argmax", group)
        if fused is not None:
            return fused
        linear = self._linear(group)
        return lambda x: argmax(linear(x))

    def experts(self, places: Sequence[str], *, chosen: int, shared: str | None = None) -> ExpertsCall:
        """The weighted outputs of the experts that a router has chosen, and of a shared one, added to the residual.

        places: `<place>.gate_proj`, `.up_proj` and `.down_proj` are the weights of an expert. shared: the place of one
        that every token has. chosen: experts of a token.
        """
        routed = [f"{place}.{part}" for place in places for part in _EXPERT_PARTS]
        beside = [] if shared is None else [f"{shared}.{part}" for part in _EXPERT_PARTS]
        group = self._group("experts", [*routed, *beside])
        group = attrs.evolve(group, experts=len(places), chosen=chosen)
        why = why_experts_apart(group.parts)
        apart: LinearCall | None = None
        if shared is not None and why is not None and why_experts_apart(group.parts[: len(routed)]) is None:
            others = attrs.evolve(group, parts=group.parts[len(routed) :], not_fused=(("experts", why),))
            apart = _swiglu_expert([self._linear(part) for part in others.split()])
            group = attrs.evolve(group, parts=group.parts[: len(routed)])
        fused = self._binder.whole("experts", group)
        if fused is not None:
            return lambda x, chosen, router, gate, residual: fused(
                x, chosen, router, gate, None if apart is None else apart(x), residual
            )
        calls = [self._linear(part) for part in group.split()]
        separate = [_swiglu_expert(calls[first : first + 3]) for first in range(0, len(calls), 3)]
        if shared is not None and apart is None:
            apart = separate[-1]
        return lambda x, chosen, router, gate, residual: weighted_sum(
            x,
            chosen,
            router,
            gate,
            None if apart is None else apart(x),
            residual,
            lambda index, rows: separate[index](rows),
        )

    def embedding(self, name: str) -> EmbeddingCall:
        """The bound gather of that weight."""
        return self._binder.plain("embedding", self._group("embedding", [name]))

    def small(self, name: str) -> Tensor:
        """A norm or other small parameter in float32, its own shape, on the model's device."""
        return self.weight(name).dequantize(torch.float32).to(self.options.device)

    def weight(self, name: str) -> Weight:
        """The weight of that canonical name on the model's device. Raises ArchitectureError if it is missing."""
        if name in self._kept:
            return self._kept[name]
        if name not in self.weights:
            raise ArchitectureError(
                "weight is missing",
                tensor=name,
                seen="not among the weights that were given",
                accepted="every weight of the plan",
                fix="load every weight of the plan",
            )
        weight = cast(Weight, self.weights[name].to(self.options.device))
        if name in self.shared:
            self._kept[name] = weight
        return weight

    def _group(self, asked: str, names: Sequence[str], *, bias: bool = False) -> Group:
        parts = tuple(
            Part(name=name, weight=self.weight(name), executed=self.options.executed.get(name, "16bit"))
            for name in names
        )
        for part in parts:
            self._doubts.look(part.name, part.weight)
            if asked != "embedding" and bias != (part.weight.bias is not None):
                problem = (
                    "has no bias, which config.json announces"
                    if bias
                    else "has a bias that config.json denies"
                )
                accepted = "attention_bias and mlp_bias as the checkpoint has them"
                raise ArchitectureError(problem, tensor=part.name, accepted=accepted)
        return Group(asked=asked, parts=parts, shared=not self.shared.isdisjoint(names))

    def _linear(self, group: Group) -> LinearCall:
        return self._binder.plain("linear", group)

    def _linears(self, group: Group) -> LinearsCall:
        fused = self._binder.whole("linears", group)
        return self._apart(group) if fused is None else _split(fused, group)

    def _apart(self, group: Group) -> LinearsCall:
        calls = tuple(self._linear(part) for part in group.split())
        return lambda x: tuple(call(x) for call in calls)

    def _linear_swiglu(self, group: Group) -> LinearCall:
        fused = self._binder.whole("linear_swiglu", group)
        if fused is not None:
            return fused
        apart = self._linears(group)

        def call(x: Tensor) -> Tensor:
            gate, up = apart(x)
            return swiglu(gate, up)

        return call


def _split(fused: LinearCall, group: Group) -> LinearsCall:
    """One result per part of the group."""
    widths = group.widths
    return lambda x: torch.split(fused(x), widths, dim=-1)


def _swiglu_expert(calls: Sequence[LinearCall]) -> LinearCall:
    """down(silu(gate(x)) * up(x)) of three linears."""
    gate, up, down = calls
    return lambda x: down(swiglu(gate(x), up(x)))
