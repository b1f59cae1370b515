"""Which rows of a dense feed-forward layer are computed by products that hand on what lies between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from vtensors.kernel_binding import BoundKernel
from vtensors.kernel_plans import KernelPlan
from vtensors.records import KernelRequest
from vtensors.self_test_runs import Runner
from vtensors_plugins.architectures.build import Parts
from vtensors_plugins.architectures.groups import Merged, failure_of

NAME = "wgmma_mlp"
# The kernels by warpgroup products whose launches it makes: a range of rows needs one kind of them.
_KINDS = {
    f"{op}_{kernel}": kernel.partition("_")[2]
    for op in ("norm_linear_swiglu", "linear_add")
    for kernel in ("nvfp4_wgmma_segments", "nvfp4_wgmma", "fp8_wgmma_segments", "fp8_wgmma_segments_in_parts")
}


class MergedMlp(Protocol):
    """Norm, gate, up and down at once."""

    def serves(self, h: Tensor) -> bool:
        """Whether it takes these rows."""

    def __call__(self, h: Tensor, gain: Tensor, eps: float) -> Tensor:
        """h [M, K] -> h + mlp(norm(h)), [M, K]."""


def mlp_for(gate_up: BoundKernel | None, down: BoundKernel | None, parts: Parts) -> MergedMlp | None:
    """What does in a launch less what the kernels of both do one after the other, with the same bits.

    gate_up: of the norm, gate and up, and down: of the sum too, bound last. None, so that each has its launches, where
    no rows are computed by warpgroup products in both, for a down with a pre-scale, for a plan, which notes it, and
    where the self-test fails, which the records of gate and up tell.
    """
    if gate_up is None or down is None:
        return None
    merged = _merged((gate_up.plan, down.plan))
    if merged is None or not parts.merges(merged, len(gate_up.plan.request.parts)):
        return None
    from vtensors_kernels.nvfp4.wgmma_mlp import WgmmaMlp
    from vtensors_plugins.backends.cuda_calls import workspace_here

    first, second = (bound.prepared[_layout(bound, merged.tokens)] for bound in (gate_up, down))
    workspace = workspace_here(first.blocks.device)
    return WgmmaMlp(first, second, parts.options.dtype, tokens=merged.tokens, workspace=workspace)


def _merged(plans: Sequence[KernelPlan]) -> Merged | None:
    """What there is for the plans of gate and up, and of down."""
    gate_up, down = plans
    rows = _rows(gate_up, down)
    if rows is None:
        return None
    return Merged(
        kernel=NAME,
        tokens=rows,
        around="down_proj, whose input gate and up lay out",
        failure=lambda run: _why_not(gate_up.request, down.request, rows, run),
        behind=1,
        again=_merged,
    )


def _rows(gate_up: KernelPlan, down: KernelPlan) -> tuple[int, int] | None:
    """The first range of rows all of which have kernels of one kind in both; None where there are none."""
    if "pre_scale" in down.request.traits:
        return None
    kinds, others = dict(_kinds(gate_up)), dict(_kinds(down))
    alike = sorted(m for m, kind in kinds.items() if others.get(m) == kind)
    if not alike:
        return None
    ends = [m for m in alike if m + 1 not in alike]
    return alike[0], ends[0]


def _kinds(plan: KernelPlan) -> Iterator[tuple[int, str]]:
    """Rows M and the kind of warpgroup products that computes them."""
    for segment in plan.segments:
        first, last = segment.tokens
        kind = _KINDS.get(segment.kernel.name)
        if kind is not None and last is not None:
            yield from ((m, kind) for m in range(first, last + 1))


def _layout(bound: BoundKernel, rows: tuple[int, int]) -> str:
    """The layout of the kernel that computes the first of the rows."""
    return next(s.kernel.layout for s in bound.segments if s.tokens[1] is None or s.tokens[1] >= rows[0])


@lru_cache(maxsize=16)
def _why_not(gate_up: KernelRequest, down: KernelRequest, rows: tuple[int, int], run: Runner) -> str | None:
    """None where the self-test passes. Raises DeviceError where that does not end."""
    from vtensors_kernels.nvfp4.wgmma_mlp_probe import probe_wgmma_mlp

    return failure_of(run, lambda: probe_wgmma_mlp(gate_up, down, rows), "the MLP's kernels")
