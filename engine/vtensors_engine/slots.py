"""Slots of the delta nets' states: one for each sequence, and which of them are free."""

from __future__ import annotations

import heapq

from vtensors.counts import counted
from vtensors.errors import VtensorsError


class SlotAllocator:
    """Gives out slots by number, lowest first.

    slots: of the pool. The last is the dummy, which padding rows of a batch read and write; no sequence gets it.
    Raises VtensorsError where none is left beside it.
    """

    def __init__(self, slots: int) -> None:
        if slots < 2:
            raise VtensorsError(
                "a pool of this size holds no sequence",
                seen=counted(slots, "slot"),
                accepted="the dummy slot and at least one other",
            )
        self.slots = slots
        self._free = list(range(slots - 1))  # a heap; a sorted list is one
        self._used: set[int] = set()

    @property
    def dummy(self) -> int:
        """The slot of padding rows."""
        return self.slots - 1

    @property
    def capacity(self) -> int:
        """Slots that can be given out at most."""
        return self.slots - 1

    @property
    def free_slots(self) -> int:
        """Slots that can be given out now."""
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """Slots that are given out."""
        return len(self._used)

    def allocate(self) -> int | None:
        """A slot, None where all are given out."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Take a slot back. Raises VtensorsError for one that is not given out."""
        if slot not in self._used:
            raise VtensorsError(
                "a slot is given back that is not given out",
                seen=f"slot {slot}",
                accepted="the slot of an allocation, once",
            )
        self._used.remove(slot)
        heapq.heappush(self._free, slot)
