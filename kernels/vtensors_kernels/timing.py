"""How long a kernel takes on a CUDA device: bound to random weights, replayed from a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vtensors.errors import RequestError
from vtensors.kernel_binding import prepare_weights
from vtensors.records import KernelRequest, KernelSpec
from vtensors_kernels.random_weights import random_weights

Call = Callable[[], object]
REPLAYS = 9
# Calls in one graph, so that a replay is long against the clock's step.
_CALLS = 24
# Weights rotated over, together, in sizes of the L2 cache; and at most so many of them.
_CACHES, _MOST_COPIES = 3, 64
_NORM_EPS = 1e-6


def measure(kernel: KernelSpec, request: KernelRequest) -> float:
    """Median microseconds of one call at request.tokens[0] rows, its weight not in the L2 cache.

    Reference kernels are launched one by one, all others from a CUDA graph as a decoder would.
    Errors: RequestError off a CUDA device and for a scheme that is not built in; whatever the kernel raises.
    """
    device = torch.device(request.device)
    if device.type != "cuda":
        raise RequestError("kernels are timed on a CUDA device", seen=request.device)
    with torch.cuda.device(device), torch.inference_mode():
        calls = _calls(kernel, request)
        return _eager(calls) if kernel.numerics == "reference" else _replayed(calls)


def _calls(kernel: KernelSpec, request: KernelRequest) -> list[Call]:
    """The kernel bound to weights of their own, as many as pass the cache together."""
    arguments = _arguments(request)
    cache = torch.cuda.get_device_properties(torch.device(request.device)).L2_cache_size
    calls: list[Call] = []
    total = 0
    while len(calls) < 2 or (total < _CACHES * cache and len(calls) < _MOST_COPIES):
        weights = random_weights(request)
        total += sum(weight.nbytes for weight in weights)
        calls.append(_bound(kernel.bind(prepare_weights(kernel, weights, request), request), arguments))
    return calls


def _bound(call: Callable[..., object], arguments: Sequence[Any]) -> Call:
    return lambda: call(*arguments)


def _arguments(request: KernelRequest) -> tuple[Any, ...]:
    """What the op's call is given, as its contract says (`vtensors_kernels.ops`)."""
    if request.shape is None:
        raise RequestError("a kernel is timed at a shape", seen="a request without one")
    (n, k), rows, device = request.shape, request.tokens[0], request.device
    dtype = getattr(torch, request.dtype)
    if request.op == "embedding":
        return torch.randint(0, n, (rows,), device=device), dtype
    x = torch.randn(rows, k, device=device).to(dtype)
    if request.op == "experts":
        chosen = (
            torch.rand(rows, request.experts, device=device).argsort(-1)[:, : request.chosen].to(torch.int32)
        )
        router = torch.full(chosen.shape, 1 / request.chosen, device=device)
        return x, chosen, router, None, None, x
    if request.op == "linear_add":
        return x, torch.randn(rows, n, device=device).to(dtype)
    if request.op.startswith("norm_"):
        return x, torch.ones(k, device=device), _NORM_EPS
    return (x,)


def _replayed(calls: Sequence[Call]) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        rounds = max(1, _CALLS // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in [*calls] * rounds:
                call()
        return _median(graph.replay, stream) / (rounds * len(calls))


def _eager(calls: Sequence[Call]) -> float:
    stream = torch.cuda.current_stream()

    def run() -> None:
        for call in calls:
            call()

    return _median(run, stream) / len(calls)


def _median(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Microseconds of one run; two come first that do not count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(REPLAYS + 2):
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])
