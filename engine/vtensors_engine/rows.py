"""Rows of a decode batch: a dense block of running sequences, padded to a bucket that has a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from vtensors.counts import counted
from vtensors.errors import VtensorsError

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def bucket_for(count: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The smallest bucket with at least count rows. Raises VtensorsError where none has, and below one row."""
    found = next((bucket for bucket in buckets if bucket >= count), None)
    if found is None or count < 1:
        raise VtensorsError(
            "no bucket has that many rows", seen=counted(count, "row"), accepted=f"1 to {buckets[-1]}"
        )
    return found


@attrs.frozen(kw_only=True, slots=True)
class Change:
    """A row that holds another sequence than before.

    source: the row that held it until now, whose state moves here; None for a sequence that joins the batch.
    """

    row: int
    handle: int
    source: int | None


class RowTable:
    """Which sequence is in which of the rows 0 .. count - 1. capacity: most of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._handles: list[int] = []
        self._rows: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self._handles)

    @property
    def handles(self) -> tuple[int, ...]:
        """The sequence of every row."""
        return tuple(self._handles)

    def row(self, handle: int) -> int:
        """The row of a sequence. Raises VtensorsError for one that is in none."""
        if handle not in self._rows:
            raise VtensorsError("a sequence has no row", seen=f"handle {handle}")
        return self._rows[handle]

    def assign(self, handles: Sequence[int]) -> tuple[Change, ...]:
        """Let exactly these sequences have rows, and return what changes; a staying one keeps its row if it can.

        The row of a leaving sequence is filled with the last one, else with a new sequence; the other new ones
        go behind. A source is never below the new count and the row it goes to always is, so the changes do
        not meet and can be made in any order.

        Raises VtensorsError, and changes nothing, for more than capacity and for a sequence named twice.
        """
        wanted = set(handles)
        if len(handles) > self.capacity or len(wanted) != len(handles):
            raise VtensorsError(
                "these sequences cannot have rows",
                seen=f"{counted(len(handles), 'sequence')}, {len(wanted)} of them different",
                accepted=f"at most {self.capacity}, each once",
            )
        if wanted == self._rows.keys():
            return ()
        count, before = len(handles), self._handles
        holes = [row for row in range(count) if row >= len(before) or before[row] not in wanted]
        moving = [row for row in range(len(before) - 1, count - 1, -1) if before[row] in wanted]
        coming = [handle for handle in handles if handle not in self._rows]
        filling = [*((before[row], row) for row in moving), *((handle, None) for handle in coming)]
        changes = tuple(
            Change(row=row, handle=handle, source=source)
            for row, (handle, source) in zip(holes, filling, strict=True)
        )
        filled = {change.row: change.handle for change in changes}
        self._handles = [filled[row] if row in filled else before[row] for row in range(count)]
        self._rows = {handle: row for row, handle in enumerate(self._handles)}
        return changes
