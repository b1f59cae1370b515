"""Which kernel computes an op on a weight: candidates filtered with a reason each, the cheapest one bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest, KernelSpec

Rejected = tuple[tuple[str, str], ...]


@attrs.frozen(kw_only=True)
class BoundKernel:
    """A kernel in its place. call: what the layer calls. rejected: (kernel, reason) of those passed over."""

    kernel: KernelSpec
    call: Callable[..., Any]
    rejected: Rejected


@attrs.frozen(kw_only=True)
class Ranking:
    """What `rank` found: the kernels that may serve a request, best first, and why the others may not."""

    request: KernelRequest
    candidates: tuple[KernelSpec, ...]
    rejected: Rejected


def rank(request: KernelRequest, kernels: Sequence[KernelSpec]) -> Ranking:
    """All kernels of the request's op, sorted into candidates by (cost, name) and rejected with a reason.

    A kernel whose `refuse` raises is rejected with the exception as its reason.
    """
    candidates, rejected = [], []
    for kernel in kernels:
        if kernel.op != request.op:
            continue
        reason = _reason_against(kernel, request)
        if reason is None:
            candidates.append(kernel)
        else:
            rejected.append((kernel.name, reason))
    candidates.sort(key=lambda kernel: (kernel.cost, kernel.name))
    return Ranking(request=request, candidates=tuple(candidates), rejected=tuple(rejected))


def select(request: KernelRequest, kernels: Sequence[KernelSpec]) -> tuple[KernelSpec, Rejected]:
    """The best kernel for the request and the (name, reason) of every rejected one.

    Raises VtensorsError, listing every candidate with its reason, where none is left.
    """
    ranking = rank(request, kernels)
    if not ranking.candidates:
        raise _no_kernel(request, ranking.rejected)
    return ranking.candidates[0], ranking.rejected


def bind(ranking: Ranking, weight: Any) -> BoundKernel:
    """The best candidate that binds to the weight; one that raises loses, with the exception as its reason.

    Raises VtensorsError, listing every candidate with its reason, where none is left.
    """
    rejected = list(ranking.rejected)
    for kernel in ranking.candidates:
        try:
            call = kernel.bind(weight, ranking.request)
        except PLUGIN_FAILURES as problem:
            rejected.append((kernel.name, f"failed to bind: {_told(problem)}"))
        else:
            return BoundKernel(kernel=kernel, call=call, rejected=tuple(rejected))
    raise _no_kernel(ranking.request, tuple(rejected))


def _reason_against(kernel: KernelSpec, request: KernelRequest) -> str | None:
    if "*" not in kernel.schemes and request.scheme not in kernel.schemes:
        return f"computes {', '.join(kernel.schemes)}, not {request.scheme}"
    if not any(_serves(target, request) for target in kernel.targets):
        return f"made for {', '.join(kernel.targets)}, not {_device(request)}"
    try:
        return kernel.refuse(request)
    except PLUGIN_FAILURES as problem:
        return f"failed to say whether it can: {_told(problem)}"


def _serves(target: str, request: KernelRequest) -> bool:
    if target == "portable":
        return True
    if request.capability is None:
        return target == request.device.partition(":")[0]
    major, minor = request.capability
    return target in ("cuda", f"sm_{major}{minor}", f"sm_{major}{minor}a")


def _device(request: KernelRequest) -> str:
    if request.capability is None:
        return request.device.partition(":")[0]
    major, minor = request.capability
    return f"sm_{major}{minor}"


def _told(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__


def _no_kernel(request: KernelRequest, rejected: Rejected) -> VtensorsError:
    listed = "\n    ".join(f"{name}: {reason}" for name, reason in rejected)
    return VtensorsError(
        f"no kernel computes '{request.op}' on {request.scheme} weights with {request.activations} "
        f"activations on {_device(request)}",
        seen=f"candidates\n    {listed}" if rejected else f"no kernel is registered for '{request.op}'",
        fix="enable a plugin that brings one (`vtensors plugins` lists them)",
    )
