"""Weights for a device, read ahead of the builder: threads fill pinned memory, the builder's thread copies out of it.

    ahead = ReadAhead(checkpoint, modules, device)     # modules: in the order in which they will be asked for
    weight = ahead.read(module)                        # on the device, values checked
    ahead.close()

Modules that follow one another share a slot of host memory, up to its size; neighbours in a file are read by one call,
and the file's pages are given back. Their values are checked there, by the threads. A weight larger than a slot is
copied in pieces and checked on the device. What is asked for out of order, and what is small, is read when it is asked
for. Host memory: the slots, whatever the size of the model.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from vtensors.checkpoint import Checkpoint
from vtensors.reading import TensorReader, Wanted
from vtensors.records import Weight
from vtensors.tensor_source import MappedTensors, typed_tensor
from vtensors.tensors import TensorInfo
from vtensors_engine.staging import Slot, aligned_size, copied_in_pieces, copied_weight, on_stream_of
from vtensors_formats import Weight as CanonicalWeight

SLOT_BYTES, SLOTS, THREADS = 64 << 20, 5, 3
# Below this a weight is read when it is asked for: norms and their like, whose order is the builder's business.
SMALL_BYTES = 128 << 10
_MOST_MODULES = 512  # of a slot
_PIECES = 2  # slots that a weight larger than one goes through


@attrs.frozen(kw_only=True)
class Batch:
    """Modules that are read together. nbytes: of the slot, more than it has for a module on its own."""

    modules: tuple[str, ...]
    nbytes: int


@attrs.frozen(eq=False)
class _Staged:
    """A `TensorSource` over tensors that are in memory; others are read."""

    tensors: Mapping[str, Tensor]
    others: MappedTensors

    def view(self, info: TensorInfo) -> Tensor:
        """The tensor as stored."""
        found = self.tensors.get(info.name)
        return self.others.view(info) if found is None else found


@attrs.define(eq=False)
class _Result:
    """What a thread made of a batch. weights: module -> the weight, or why there is none. slot: where they lie."""

    weights: dict[str, CanonicalWeight | Exception | None]
    slot: Slot | None


def batches(sizes: Mapping[str, int], slot_bytes: int) -> list[Batch]:
    """The modules in order, as many in one batch as a slot holds. sizes: module -> bytes of a slot."""
    found: list[Batch] = []
    modules: list[str] = []
    filled = 0
    for module, size in sizes.items():
        if modules and (filled + size > slot_bytes or len(modules) == _MOST_MODULES):
            found.append(Batch(modules=tuple(modules), nbytes=filled))
            modules, filled = [], 0
        modules.append(module)
        filled += size
    return [*found, Batch(modules=tuple(modules), nbytes=filled)] if modules else found


class ReadAhead:
    """See above. modules: of the checkpoint, in order. The other arguments are for tests.

    One thread may call `read`, the one whose current stream the device's work goes to.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        modules: Sequence[str],
        device: torch.device,
        *,
        slot_bytes: int = SLOT_BYTES,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._reader = TensorReader(checkpoint.snapshot, mmap=False)
        self._plain = MappedTensors(self._reader)
        self._slot_bytes = slot_bytes
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        sizes = {module: self._size(module) for module in modules}
        planned = {m: size for m, size in sizes.items() if size is not None and size >= small_bytes}
        self._batches = batches(planned, slot_bytes)
        self._batch_of = {m: number for number, batch in enumerate(self._batches) for m in batch.modules}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="vtensors-read")
        # None: closed. With one slot more than batches on their way, one that needs two always gets them at last.
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._window = min(SLOTS - 1, len(self._batches))
        for _ in range(self._window + 1 if self._window else 0):
            self._free.put(Slot(slot_bytes, device, self._closed))
        self._results: dict[int, Future[_Result]] = {}
        self._head = self._next = 0
        self.read_ahead = self.read_plainly = 0
        self._launch()

    def read(self, module: str) -> Weight:
        """The module's weight on the device. Errors: as `Checkpoint.read`."""
        number = self._batch_of.get(module)
        # Far ahead: reading everything before it for nothing would be worse.
        if number is None or not self._head <= number < self._next:
            return self._read_plainly(module)
        while self._head < number:
            self._drop_head()
        result = self._results[number].result()
        weight = result.weights.pop(module, None)
        if isinstance(weight, Exception):
            raise weight
        if weight is None:
            found = self._read_plainly(module)
        else:
            found = cast(Weight, weight if result.slot is None else copied_weight(weight, self._device))
            self.read_ahead += 1
        if not result.weights:
            self._drop_head()
        return found

    def close(self) -> None:
        """Ends the threads and gives the memory back."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._free.put(None)
        self._pool.shutdown(wait=True)
        self._results.clear()
        self._reader.close()

    def _read_plainly(self, module: str) -> Weight:
        self.read_plainly += 1
        part = self._checkpoint.modules[module].claim.part if module in self._checkpoint.modules else None
        # One expert of a stacked tensor is a view of the mapping; read, it would be the whole tensor each time.
        if part is not None:
            return self._checkpoint.read(module).to(self._device)
        return self._checkpoint.read_from(module, self._plain).to(self._device)

    def _size(self, module: str) -> int | None:
        """Bytes of a slot; None for one expert of a stacked tensor."""
        claim = self._checkpoint.modules[module].claim
        if claim.part is not None:
            return None
        return sum(aligned_size(info.nbytes) for info in claim.roles.values())

    def _launch(self) -> None:
        """So many batches are being read, waiting to be, or waiting to be asked for."""
        while self._next < len(self._batches) and self._next < self._head + self._window:
            batch = self._batches[self._next]
            self._results[self._next] = self._pool.submit(self._run, batch)
            self._next += 1

    def _drop_head(self) -> None:
        result = self._results.pop(self._head).result()
        if result.slot is not None:
            result.slot.mark()
            self._free.put(result.slot)
        self._head += 1
        self._launch()

    # ---- in the threads

    def _run(self, batch: Batch) -> _Result:
        with on_stream_of(self._device, self._stream):
            try:
                if batch.nbytes > self._slot_bytes:
                    return self._run_large(batch.modules[0])
                return self._run_small(batch)
            except Exception as problem:  # told by `read`, in the thread that asks for the weight
                return _Result(weights=dict.fromkeys(batch.modules, problem), slot=None)

    def _run_small(self, batch: Batch) -> _Result:
        slot = self._take()
        try:
            slot.wait()
            tensors: dict[str, Tensor] = {}
            wanted: list[Wanted] = []
            place = 0
            for info in self._infos(batch.modules):
                end = place + info.nbytes
                wanted.append(Wanted(info=info, into=slot.memory(place, end)))
                tensors[info.name] = typed_tensor(slot.bytes[place:end], info)
                place += aligned_size(info.nbytes)
            self._reader.read_into(wanted, release=True)
            source = _Staged(tensors, self._plain)
            return _Result(weights={m: self._weight(m, source) for m in batch.modules}, slot=slot)
        except Exception:
            self._free.put(slot)
            raise

    def _run_large(self, module: str) -> _Result:
        slots = [self._take() for _ in range(_PIECES)]
        try:
            tensors = {
                info.name: typed_tensor(self._in_pieces(info, slots), info) for info in self._infos([module])
            }
        finally:
            for slot in slots:
                self._free.put(slot)
        return _Result(weights={module: self._weight(module, _Staged(tensors, self._plain))}, slot=None)

    def _in_pieces(self, info: TensorInfo, slots: Sequence[Slot]) -> Tensor:
        def read(start: int, into: memoryview) -> None:
            self._reader.read_into([Wanted(info=info, into=into, start=start)], release=True)

        return copied_in_pieces(info.nbytes, read, slots, self._device)

    def _infos(self, modules: Sequence[str]) -> list[TensorInfo]:
        """Of all tensors of the modules, each once."""
        found = {
            info.name: info
            for module in modules
            for info in self._checkpoint.modules[module].claim.roles.values()
        }
        return list(found.values())

    def _weight(self, module: str, source: _Staged) -> CanonicalWeight | Exception | None:
        """The checked weight; None for one of a third party's class, whose tensors nobody here knows how to copy."""
        try:
            weight: Any = self._checkpoint.read_from(module, source)
        except Exception as problem:  # as in `_run`
            return problem
        return weight if isinstance(weight, CanonicalWeight) else None

    def _take(self) -> Slot:
        slot = self._free.get()
        if slot is None:
            self._free.put(None)
            raise RuntimeError("closed while reading")
        return slot
