"""How fast a launch can read a given number of bytes on this device: the floor of a kernel that must read a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
from graph_timing import copies_of, time_calls
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, load_function
from vtensors_kernels.compiling.nvrtc import compile_source, find_toolkit
from vtensors_kernels.compiling.sources import Source

SOURCE = Path(__file__).resolve().parent / "cuda" / "read_ceiling.cu"
# Blocks per multiprocessor (0: as many as the data needs) and threads, for loads.
LOADS = ((4, 4, 512), (4, 8, 256), (4, 0, 256), (4, 0, 512), (8, 0, 256), (8, 0, 512))
# Bytes of a piece, stages of a ring, blocks per multiprocessor, for bulk copies.
BULK = ((8192, 4, 4), (8192, 8, 2), (16384, 6, 2), (16384, 12, 1))
PEAK_BYTES = 4_294_967_296
_SHARED = max(piece * stages for piece, stages, _ in BULK)


@attrs.frozen(kw_only=True)
class Floor:
    """The fastest read of nbytes. us: median. how: kernel and configuration. loads_us, bulk_us: best of each kind."""

    nbytes: int
    us: float
    how: str
    loads_us: float
    bulk_us: float | None

    @property
    def gb_s(self) -> float:
        """GB/s."""
        return self.nbytes / self.us / 1e3


@attrs.define(kw_only=True)
class Reader:
    """The compiled kernels and the memory that they read, random bytes."""

    pool: Tensor
    sink: Tensor
    functions: dict[str, DeviceFunction]
    processors: int

    @classmethod
    def make(cls, largest: int, device: int = 0) -> Reader:
        """For floors of at most `largest` bytes. Errors: VtensorsError where nothing can be compiled or loaded."""
        toolkit = find_toolkit()
        if isinstance(toolkit, str):
            raise VtensorsError(toolkit)
        target = target_of(torch.cuda.get_device_capability(device))
        image = compile_source(Source(name=SOURCE.name, text=SOURCE.read_text()), target, {}, toolkit)
        names = ["read_loads_4", "read_loads_8"]
        if torch.cuda.get_device_capability(device) >= (9, 0):
            names.append("read_bulk")
        words = max(2 * largest, PEAK_BYTES) // 4
        return cls(
            pool=torch.empty(words, dtype=torch.int32, device=f"cuda:{device}").random_(),
            sink=torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}"),
            functions={
                name: load_function(image, name, target, shared_bytes=_SHARED if name == "read_bulk" else 0)
                for name in names
            },
            processors=torch.cuda.get_device_properties(device).multi_processor_count,
        )

    def floor(self, nbytes: int, *, graph_us: float, replays: int) -> Floor:
        """The fastest of all configurations for that many bytes (a multiple of 16), rotating like the weights do."""
        copies = min(copies_of(nbytes), self.pool.nbytes // nbytes)
        found: dict[str, float] = {}
        for how, launch in self._launches(nbytes):
            calls = [_at(launch, self.pool.data_ptr() + i * nbytes) for i in range(copies)]
            found[how] = time_calls(calls, graph_us=graph_us, replays=replays).median
        best = min(found, key=lambda how: found[how])
        bulk = [us for how, us in found.items() if how.startswith("bulk")]
        return Floor(
            nbytes=nbytes,
            us=found[best],
            how=best,
            loads_us=min(us for how, us in found.items() if how.startswith("loads")),
            bulk_us=min(bulk) if bulk else None,
        )

    def _launches(self, nbytes: int) -> Iterator[tuple[str, Callable[[int], None]]]:
        vectors, sink = nbytes // 16, self.sink.data_ptr()
        for unroll, per_processor, threads in LOADS:
            blocks = self.processors * per_processor or -(-vectors // (unroll * threads))
            launch = Launch(
                function=self.functions[f"read_loads_{unroll}"],
                grid=(blocks, 1, 1),
                block=(threads, 1, 1),
                arguments=3,
            )
            shape = f"{per_processor} x {threads}" if per_processor else f"one pass x {threads}"
            yield f"loads {unroll} x 16 B, {shape}", _launcher(launch, (vectors, sink))
        if "read_bulk" in self.functions:
            for piece, stages, per_processor in BULK:
                launch = Launch(
                    function=self.functions["read_bulk"],
                    grid=(self.processors * per_processor, 1, 1),
                    block=(32, 1, 1),
                    arguments=4,
                    shared_bytes=piece * stages,
                )
                yield (
                    f"bulk {piece} B x {stages} x {per_processor}",
                    _launcher(launch, (nbytes, piece, stages)),
                )


def _launcher(launch: Launch, rest: tuple[int, ...]) -> Callable[[int], None]:
    return lambda address: launch.call(torch.cuda.current_stream().cuda_stream, address, *rest)


def _at(launch: Callable[[int], None], address: int) -> Callable[[], None]:
    return lambda: launch(address)
