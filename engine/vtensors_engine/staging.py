"""Host memory that weights pass on their way to a device: a few slots of fixed size, pinned where that is CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors_formats import ActivationQuantizer, Weight

# Where a tensor may begin in a slot: what kernels that read 16 bytes at a time, and copies, want of an address.
ALIGNMENT = 256
_POLL_SECONDS = 2e-4


def aligned_size(nbytes: int) -> int:
    """The bytes that a tensor takes of a slot."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slot:
    """One piece of host memory. bytes: [size] uint8. device: whose copies out of it are waited for.

    closed: set where nobody wants what would be written to it.
    """

    def __init__(self, size: int, device: torch.device, closed: threading.Event | None = None) -> None:
        self.bytes: Tensor = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._memory: memoryview = self.bytes.numpy().data
        self._device = device
        self._copied: torch.cuda.Event | None = None
        self._closed = threading.Event() if closed is None else closed

    def memory(self, begin: int, end: int) -> memoryview:
        """Bytes begin..end, writable; valid as long as the slot."""
        return self._memory[begin:end]

    def mark(self) -> None:
        """Nothing may be written to the slot before the copies launched so far on the current stream are done."""
        if self._device.type == "cuda":
            self._copied = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Until that is so. Raises RuntimeError where it is closed before: a device may hang, its reader must not."""
        if self._copied is not None:
            while not self._copied.query():  # type: ignore[no-untyped-call]
                if self._closed.wait(_POLL_SECONDS):
                    raise RuntimeError("closed while reading")
            self._copied = None


def on_stream_of(device: torch.device, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """What is launched inside goes to that stream, in whatever thread; nothing to do on a CPU."""
    if device.type != "cuda" or stream is None:
        return nullcontext()
    return torch.cuda.stream(stream)


def copied_weight(weight: Weight, device: torch.device) -> Weight:
    """A copy of the weight on the device, launched on the current stream and not waited for.

    Its present tensors must stay as they are until the copies are done.
    """
    copy: Weight = _copied(weight, device)
    return copy


def _copied(owner: Any, device: torch.device) -> Any:
    moved: dict[str, Any] = {}
    for field in attrs.fields(type(owner)):
        value = getattr(owner, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device, non_blocking=True, copy=True)
        elif isinstance(value, ActivationQuantizer):
            moved[field.name] = _copied(value, device)
    return attrs.evolve(owner, **moved) if moved else owner


def copied_in_pieces(
    nbytes: int,
    read: Callable[[int, memoryview], None],
    slots: Sequence[Slot],
    device: torch.device,
) -> Tensor:
    """[nbytes] uint8 on the device, for what is larger than a slot: one is filled while another is copied out of.

    read: fills memory with the bytes from a place on. slots: that nobody else uses.
    """
    out = torch.empty(nbytes, dtype=torch.uint8, device=device)
    step = min(slot.bytes.numel() for slot in slots)
    for number, start in enumerate(range(0, nbytes, step)):
        slot, stop = slots[number % len(slots)], min(start + step, nbytes)
        slot.wait()
        read(start, slot.memory(0, stop - start))
        out[start:stop].copy_(slot.bytes[: stop - start], non_blocking=True)
        slot.mark()
    return out
