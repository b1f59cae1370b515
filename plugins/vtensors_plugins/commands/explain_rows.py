"""Rows of `explain`: planned groups that are alike in everything but their layer, with their kernels and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.kernel_candidates import rows_in_words
from vtensors.kernel_plans import Segment
from vtensors.modules import is_quantized
from vtensors.records import KernelRequest
from vtensors_kernels.layouts import prepared_bytes
from vtensors_plugins.architectures.groups import Merged, PlannedGroup
from vtensors_plugins.commands.device_option import ReportDevice
from vtensors_plugins.commands.explain_reasons import Kernels, reworded
from vtensors_plugins.commands.kernel_facts import modelled_for, state_on
from vtensors_plugins.commands.module_names import collapsed, without_numbers

Reasons = tuple[tuple[str, str], ...]
# How reasons begin where a kernel should have worked and did not (`kernel_binding`, `verdicts`).
_FAILED = "failed "


@attrs.frozen(kw_only=True)
class SegmentRow:
    """The kernel of a range of rows. cost: microseconds at its fewest rows, None for a reference kernel.

    untested: whether nothing tests the kernel before it is used. modelled_for: the card that the cost is an estimate
    for; None where it is measured or nobody says. state: as in `kernel_facts.KernelFacts`. lost: why each other kernel
    of the op is not used there.
    """

    tokens: tuple[int, int | None]
    kernel: str
    layout: str
    reference: bool
    untested: bool
    cost: float | None
    measured: bool
    modelled_for: str | None
    state: str | None
    lost: Reasons

    @property
    def rows(self) -> str:
        """`M = 1..32`."""
        return rows_in_words(self.tokens)


@attrs.frozen(kw_only=True)
class ExplainRow:
    """Groups of modules that are computed alike.

    modules: of each group, in order of the rows of its weight. request: of one group; request.op is what runs,
    asked what the layer asked for, not_fused why they differ, or what failed to merge it. algorithms: the publisher's
    words. declared: activation precisions. stored, prepared: bytes of all groups; prepared None where a layout does
    not tell. merged: what computes some rows instead of the segments.
    """

    name: str
    modules: tuple[tuple[str, ...], ...]
    request: KernelRequest
    convention: str
    algorithms: tuple[str, ...]
    declared: tuple[str, ...]
    asked: str
    not_fused: Reasons
    assumes: tuple[str, ...]
    segments: tuple[SegmentRow, ...]
    stored: int
    prepared: int | None
    merged: Merged | None = None

    @property
    def weights(self) -> int:
        """Modules in all groups."""
        return sum(map(len, self.modules))

    @property
    def on_reference(self) -> bool:
        """Whether a reference kernel computes some number of rows."""
        return any(segment.reference for segment in self.segments)

    @property
    def failures(self) -> Reasons:
        """Kernels that should have worked and did not, with their reasons."""
        lost = [pair for segment in self.segments for pair in segment.lost]
        return tuple(dict.fromkeys(pair for pair in (*self.not_fused, *lost) if pair[1].startswith(_FAILED)))

    @property
    def is_fallback(self) -> bool:
        """Whether a load would count it: quantized weights multiplied by the reference on a GPU, or a failure."""
        slow = self.request.capability is not None and is_quantized(self.request.scheme)
        return bool(self.failures) or (slow and self.on_reference and self.request.op != "embedding")

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        request = self.request
        return {
            "name": self.name,
            "groups": len(self.modules),
            "modules": [list(group) for group in self.modules],
            "scheme": request.scheme,
            "convention": self.convention,
            "algorithms": list(self.algorithms),
            "shape": None if request.shape is None else list(request.shape),
            "parts": list(request.parts),
            "traits": sorted(request.traits),
            "declared": list(self.declared),
            "executed": request.activations,
            "asked": self.asked,
            "op": request.op,
            "not_fused": [{"what": what, "reason": reason} for what, reason in self.not_fused],
            "assumes": list(self.assumes),
            "kernels": [
                {
                    "tokens": list(segment.tokens),
                    "kernel": segment.kernel,
                    "layout": segment.layout,
                    "microseconds": segment.cost,
                    "measured": segment.measured,
                    "modelled_for": segment.modelled_for,
                    "state": segment.state,
                    "self_tested": not segment.untested,
                    "lost": [{"kernel": name, "reason": reason} for name, reason in segment.lost],
                }
                for segment in self.segments
            ],
            "merged": None
            if self.merged is None
            else {
                "tokens": list(self.merged.tokens),
                "kernel": self.merged.kernel,
                "with": self.merged.around,
            },
            "stored_bytes": self.stored,
            "prepared_bytes": self.prepared,
            "fallback": self.is_fallback,
        }


@attrs.frozen(kw_only=True)
class Totals:
    """Sums over all rows. prepared: bytes of the layouts that tell their size; complete: whether all do.

    A module that two ops use as it is stored (embeddings that are the head too) counts once.
    """

    weights: int
    fallbacks: int
    on_reference: int
    stored: int
    prepared: int
    complete: bool

    @classmethod
    def of(cls, rows: Iterable[ExplainRow]) -> Totals:
        """The sums."""
        found = list(rows)
        seen: set[tuple[str, ...]] = set()
        stored = prepared = 0
        for row in found:
            again = seen.issuperset(row.modules)
            seen.update(row.modules)
            stored += 0 if again else row.stored
            in_place = again and all(segment.layout == "stored" for segment in row.segments)
            prepared += 0 if in_place else row.prepared or 0
        return cls(
            weights=sum(row.weights for row in found),
            fallbacks=sum(row.weights for row in found if row.is_fallback),
            on_reference=sum(row.weights for row in found if row.on_reference),
            stored=stored,
            prepared=prepared,
            complete=all(row.prepared is not None for row in found),
        )


def explain_rows(
    checkpoint: Checkpoint, groups: Sequence[PlannedGroup], device: ReportDevice
) -> tuple[ExplainRow, ...]:
    """The rows, in the order in which the model's builder asks for the first group of each.

    Groups make one row where they differ in numbers only, or, being computed apart, in the last part of the name too.
    """
    kernels = checkpoint.plugins.registry.kernels
    rows: dict[ExplainRow, dict[str, list[PlannedGroup]]] = {}
    for group in groups:
        row = _row(checkpoint, kernels, group, device)
        leaf = "" if len(group.modules) > 1 else group.modules[0].rpartition(".")[2]
        rows.setdefault(row, {}).setdefault(leaf, []).append(group)
    return tuple(
        _gathered(row, sides) for row, leaves in rows.items() for sides in _side_by_side(leaves.values())
    )


def _side_by_side(leaves: Iterable[list[PlannedGroup]]) -> list[list[list[PlannedGroup]]]:
    """Lists of groups put together where they are of the same layers: gate_proj beside up_proj."""
    found: dict[tuple[str, ...], list[list[PlannedGroup]]] = {}
    for groups in leaves:
        layers = tuple(group.modules[0].rpartition(".")[0] for group in groups)
        found.setdefault(layers, []).append(groups)
    return list(found.values())


def _row(checkpoint: Checkpoint, kernels: Kernels, group: PlannedGroup, device: ReportDevice) -> ExplainRow:
    """The row of one group, without what differs from layer to layer; equal for groups that are alike."""
    modules = [checkpoint.modules[name] for name in group.modules if name in checkpoint.modules]
    name = "|".join(dict.fromkeys(map(without_numbers, group.modules)))
    return ExplainRow(
        name=name if len(group.modules) > 1 else name.rpartition(".")[0],
        modules=(),
        request=group.request,
        convention=", ".join(dict.fromkeys(module.convention for module in modules)),
        algorithms=tuple(
            dict.fromkeys(m.algorithm for m in modules if m.algorithm and is_quantized(m.scheme))
        ),
        declared=tuple(dict.fromkeys(group.declared)),
        asked=group.asked,
        not_fused=tuple(
            (without_numbers(what), without_numbers(reworded(what, reason, kernels)))
            for what, reason in group.not_fused
        ),
        assumes=group.assumes,
        segments=tuple(_segment(segment, kernels, device) for segment in group.plan.segments),
        stored=0,
        prepared=0,
        merged=group.merged,
    )


def _segment(segment: Segment, kernels: Kernels, device: ReportDevice) -> SegmentRow:
    kernel, best = segment.kernel, segment.candidates[0]
    reference = kernel.numerics == "reference"
    owner = kernels.get(kernel.name)
    return SegmentRow(
        tokens=segment.tokens,
        kernel=kernel.name,
        layout=kernel.layout,
        reference=reference,
        untested=kernel.untested,
        cost=None if reference else best.cost,
        measured=best.measured,
        modelled_for=None if owner is None or best.measured else modelled_for(kernel, owner.distribution),
        state=None if owner is None else state_on(kernel, owner.distribution, device),
        lost=tuple((name, reworded(name, reason, kernels)) for name, reason in segment.lost),
    )


def _gathered(row: ExplainRow, sides: Sequence[Sequence[PlannedGroup]]) -> ExplainRow:
    """sides: lists of groups of the same layers, one list unless the groups have one module each."""
    groups = [group for side in sides for group in side]
    names = [tuple(name for group in beside for name in group.modules) for beside in zip(*sides, strict=True)]
    layouts = dict.fromkeys(segment.layout for segment in row.segments)
    each = [prepared_bytes(layout, group.request, group.nbytes) for layout in layouts for group in groups]
    known = [size for size in each if size is not None]
    return attrs.evolve(
        row,
        name=collapsed(names),
        modules=tuple(group.modules for group in groups),
        stored=sum(group.nbytes for group in groups),
        prepared=sum(known) if len(known) == len(each) else None,
    )
