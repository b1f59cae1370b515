"""Groups of modules that one kernel computes: planned for a device that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import DeviceError
from vtensors.kernel_candidates import told
from vtensors.records import KernelRequest
from vtensors.selection import KernelPlan
from vtensors.self_test_runs import Runner, require_end


@attrs.frozen(kw_only=True)
class Merged:
    """A kernel that computes a group with its neighbours in fewer launches, with the bits of the group's own kernels.

    kernel: its name. tokens: the rows M that it serves. around: what else it computes, in words. failure: runs its
    self-test on the device, which must be there: why it does not work, None where it passes. behind: groups of one
    weight, planned right after its own, whose kernels it depends on too. again: what is to be merged where others are
    planned for its group and for those behind, None where nothing is.
    """

    kernel: str
    tokens: tuple[int, int]
    around: str
    failure: Callable[[Runner], str | None] = attrs.field(eq=False, repr=False)
    behind: int = 0
    again: Callable[[Sequence[KernelPlan]], Merged | None] = attrs.field(eq=False, repr=False)


def failure_of(run: Runner, test: Callable[[], None], kernel: str) -> str | None:
    """Why the self-test fails, None where it passes. Raises DeviceError, naming the kernel, where it does not end."""
    try:
        require_end(run, test, kernel)
    except DeviceError:
        raise
    except PLUGIN_FAILURES as problem:  # without CuPy or cuda-bindings there are errors of theirs
        return f"failed its self-test: {told(problem)}"
    return None


@attrs.frozen(kw_only=True)
class PlannedGroup:
    """Modules that are computed together, and the kernels that would.

    modules: in the order of their rows. asked: the op that the layer asked for; request: what is planned in
    the end, so request.op is asked or a step of its decomposition, as not_fused explains: (op or kernel, reason).
    declared: activation precision of each module. assumes: what headers cannot tell. nbytes: stored. merged: what
    computes some rows instead of the plan's kernels.
    """

    modules: tuple[str, ...]
    asked: str
    request: KernelRequest
    plan: KernelPlan
    declared: tuple[str, ...]
    not_fused: tuple[tuple[str, str], ...] = ()
    assumes: tuple[str, ...] = ()
    nbytes: int = 0
    merged: Merged | None = None


@attrs.define(kw_only=True)
class DryRun:
    """Given to a builder instead of a device: nothing is bound, the groups are noted in the builder's order.

    device: `cpu`, `cuda:0`, ...; capability: of a CUDA device; assumed: it is not there. Weights may be without
    data (`meta`).
    """

    device: str
    capability: tuple[int, int] | None = None
    assumed: bool = False
    planned: list[PlannedGroup] = attrs.field(factory=list)
