"""The linear that the shipped selection binds to given weights, and what it launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache

import attrs
import torch
from torch import Tensor

from vtensors.kernel_binding import bind_plan
from vtensors.kernel_plans import KernelPlan
from vtensors.kernel_rules import KernelRules
from vtensors.manager import default_plugins
from vtensors.measured_costs import MeasuredCosts
from vtensors.records import KernelRequest
from vtensors.selection import plan_kernels
from vtensors.verdicts import Verdicts, kernel_versions
from vtensors_formats.weight import Weight
from vtensors_kernels.compiling.cubin_cache import default_cache_folder
from vtensors_kernels.compiling.launch import Launch
from vtensors_kernels.self_tests import device_identity
from vtensors_kernels.timing import measure

Call = Callable[..., Tensor]


@attrs.frozen(kw_only=True)
class SelectedLinear:
    """A bound linear.

    kernels: first row, last row (None = any) and name. rejected: kernel and why it serves nowhere.
    """

    call: Call
    kernels: tuple[tuple[int, int | None, str], ...]
    rejected: tuple[tuple[str, str], ...]
    prepared_bytes: int

    def kernel_for(self, rows: int) -> str:
        """The name of the kernel that computes that many rows."""
        return next(
            (name for low, high, name in self.kernels if low <= rows and (high is None or rows <= high)),
            "decomposed",
        )


def bind_linear(
    weights: Sequence[Weight],
    op: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    activations: str = "16bit",
    only: str = "*",
) -> SelectedLinear:
    """The kernels of the enabled plugins for these weights, one per part, any number of rows.

    activations: as in `KernelRequest`. only: glob of the names of kernels that may be taken.
    Switches act as in a load. Errors: VtensorsError with every
    kernel's reason where none serves the op whole.
    """
    request = request_for([weight.shape for weight in weights], weights[0].scheme, op, dtype, device)
    plan = plan_linear(attrs.evolve(request, activations=activations), only)
    bound = bind_plan(plan, weights, _verdicts(device))
    return SelectedLinear(
        call=bound.call,
        kernels=tuple((*segment.tokens, segment.kernel.name) for segment in bound.segments),
        rejected=tuple(bound.rejected),
        prepared_bytes=bound.prepared_bytes,
    )


def request_for(
    shapes: Sequence[tuple[int, ...]], scheme: str, op: str, dtype: torch.dtype, device: torch.device
) -> KernelRequest:
    """What a layer with these parts [N_i, K] asks for, as a model's layers do."""
    rows = tuple(shape[0] for shape in shapes)
    return KernelRequest(
        op=op,
        scheme=scheme,
        activations="16bit",
        device=str(device),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=str(dtype).removeprefix("torch."),
        shape=(sum(rows), shapes[0][1]),
        parts=rows,
    )


@lru_cache(maxsize=256)
def plan_linear(request: KernelRequest, only: str = "*") -> KernelPlan:
    """The plan for a request with the kernels of the enabled plugins, under `VT_KERNELS` and `VT_AUTOTUNE`."""
    plugins = default_plugins()
    switches = plugins.read_switches()
    kernels = tuple(owned.record for owned in plugins.registry.kernels.values())
    rules = KernelRules.parse(switches.text("VT_KERNELS"), kernels, plugins.registry.schemes)
    verdicts = _verdicts(torch.device(request.device))
    cost_of = None
    if switches.flag("VT_AUTOTUNE") and verdicts is not None:
        cost_of = MeasuredCosts(verdicts=verdicts, measure=measure).cost_of
    allowed = tuple(kernel for kernel in kernels if fnmatchcase(kernel.name, only))
    return plan_kernels(request, allowed, rules, cost_of=cost_of)


@lru_cache(maxsize=8)
def _verdicts(device: torch.device) -> Verdicts | None:
    """One for the process: what passed once is not tested again for the next copy of the weight."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    plugins = default_plugins()
    return Verdicts(
        folder=plugins.read_switches().path("VT_CACHE_DIR") or default_cache_folder(),
        device=device_identity(device),
        versions=kernel_versions(plugins),
        capturing=torch.cuda.is_current_stream_capturing,
    )


@contextmanager
def launches_seen() -> Iterator[list[tuple[str, bool]]]:
    """The (kernel function, programmatic dependent launch) of everything launched through `Launch` in the block."""
    seen: list[tuple[str, bool]] = []
    plain = Launch.call

    def call(self: Launch, stream: int, *arguments: int) -> None:
        seen.append((self.function.name, self.dependent))
        plain(self, stream, *arguments)

    with _replaced_call(call):
        yield seen


@contextmanager
def no_dependent_launches() -> Iterator[None]:
    """In the block kernels start after the one before has ended: launches have that attribute switched off."""
    plain = Launch.call

    def call(self: Launch, stream: int, *arguments: int) -> None:
        allowed = _dependence(self._config.getPtr())
        for value in allowed:
            value.value = 0
        try:
            plain(self, stream, *arguments)
        finally:
            for value in allowed:
                value.value = 1

    with _replaced_call(call):
        yield


def _dependence(config: int) -> list[ctypes.c_int]:
    """The values of PROGRAMMATIC_STREAM_SERIALIZATION (6) among a launch's attributes that are 1.

    config: address of a CUlaunchConfig, with the pointer to the attributes at 40 and their number at 48; an
    attribute has 72 bytes, its id first and its value at 8 (cuda.h, CUDA 12 and 13).
    """
    first = ctypes.c_uint64.from_address(config + 40).value
    count = ctypes.c_uint32.from_address(config + 48).value
    places = [first + 72 * i for i in range(count)]
    found = [ctypes.c_int.from_address(at + 8) for at in places if ctypes.c_int.from_address(at).value == 6]
    return [value for value in found if value.value == 1]


@contextmanager
def _replaced_call(call: Callable[..., None]) -> Iterator[None]:
    plain = Launch.call
    Launch.call = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.call = plain  # type: ignore[method-assign]
