"""Times of GPU work from replays of CUDA graphs, and a check of its result against a float32 reference."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

Call = Callable[[], object]
# Of ||y - reference|| / ||reference||: twice what rounding the outputs to bfloat16 gives.
ERROR_LIMIT = 5e-3
# The weights of one graph together; the L2 cache of an H200 has 60 MB.
ROTATED_BYTES = 400_000_000


@attrs.frozen(kw_only=True)
class Times:
    """Microseconds of one call: median, lowest and highest replay. launches: calls in the graph. last: its result."""

    median: float
    low: float
    high: float
    launches: int
    last: object

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (self.high - self.low) / self.median


def copies_of(nbytes: int, rotated: int = ROTATED_BYTES) -> int:
    """How many copies of a weight a graph rotates over: at least two, and enough to pass the L2 cache."""
    return max(2, -(-rotated // nbytes))


def time_calls(calls: Sequence[Call], *, graph_us: float, replays: int) -> Times:
    """Time of one call, from a graph that runs all of them in turn, for about graph_us microseconds.

    Two replays come first that do not count.
    """
    stream = torch.cuda.Stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def capture(rounds: int) -> tuple[torch.cuda.CUDAGraph, object]:
        graph, last = torch.cuda.CUDAGraph(), None
        torch.cuda.synchronize()
        # Without torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for call in calls:
                    last = None  # its memory is free for the next call, as in a decoder
                    last = call()
        finally:
            graph.capture_end()
        return graph, last

    def replay(graph: torch.cuda.CUDAGraph) -> float:
        begin.record(stream)
        graph.replay()
        end.record(stream)
        stream.synchronize()
        return begin.elapsed_time(end) * 1e3

    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        # One round, as a graph: launched one by one, small kernels take as long as the host needs.
        first, _ = capture(1)
        estimate = max(min(replay(first) for _ in range(3)), 1.0)
        rounds = max(1, round(graph_us / estimate))
        launches = rounds * len(calls)
        graph, last = capture(rounds)
        times = [replay(graph) / launches for _ in range(replays + 2)]
    kept = times[2:]
    if isinstance(last, Tensor):
        last = last.clone()  # outlives the graph's memory
        torch.cuda.synchronize()
    return Times(median=statistics.median(kept), low=min(kept), high=max(kept), launches=launches, last=last)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference|| in float32; NaN where the result has one."""
    return float((result.float() - reference).norm() / reference.norm())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialized is filled with NaN, so that an element not written shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
