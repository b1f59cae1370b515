"""Which sequence is in which row of the device, also after a change of rows that failed; without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vtensors.errors import VtensorsError
from vtensors_engine.cuda.device_rows import DeviceRows
from vtensors_engine.cuda.runner import CudaRunner, _require_decoder, _Running
from vtensors_engine.rows import RowTable

DUMMY = 8


def _runner(rows: int) -> Any:
    """One of which nothing but the rows is there."""
    runner: Any = object.__new__(CudaRunner)
    runner._rows = DeviceRows.empty(rows, 2, DUMMY, torch.device("cpu"))
    runner._table, runner._occupied, runner._sequences = RowTable(rows), 0, {}
    return runner


def _began(runner: Any, *handles: int) -> None:
    for handle in handles:
        first = torch.tensor([100 + handle])
        runner._sequences[handle] = _Running(prompt=(1, 2, 3), pages=(handle + 1,), slot=handle, first=first)


def _rows(runner: Any) -> list[tuple[int, int, int, int]]:
    rows = runner._rows
    columns = (rows.tokens, rows.steps, rows.slots, rows.page_table[:, 0])
    return list(zip(*(column.tolist() for column in columns), strict=True))


PADDING = (0, 0, DUMMY, 0)


def test_rows_are_dense_and_those_behind_are_padding() -> None:
    runner = _runner(4)
    _began(runner, 0, 1, 2, 3)
    runner._arrange([0, 1, 2, 3])
    runner._arrange([1, 3])
    assert _rows(runner) == [(103, 1, 3, 4), (101, 1, 1, 2), PADDING, PADDING]
    assert int(runner._rows.positions[2:].abs().sum()) == 0


@pytest.mark.parametrize("where", ["move", "enter", "leave"])
def test_a_change_of_rows_that_fails_leaves_no_row_running_that_nobody_knows(where: str) -> None:
    runner = _runner(4)
    _began(runner, 0, 1, 2, 3, 4)
    runner._arrange([0, 1, 2, 3])

    def failing(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 512 bytes")

    before = getattr(DeviceRows, where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRows, where, failing)
        with pytest.raises(torch.OutOfMemoryError):
            runner._arrange([1, 4, 3] if where == "enter" else [1, 3])
    assert getattr(DeviceRows, where) is before
    # The engine ends all and releases them; others come then.
    runner._sequences.clear()
    _began(runner, 5, 6, 7)
    runner._arrange([5, 6, 7])
    assert _rows(runner) == [(105, 1, 5, 6), (106, 1, 6, 7), (107, 1, 7, 8), PADDING]
    runner._arrange([6])
    assert _rows(runner)[1:] == [PADDING] * 3


def test_a_model_without_a_decoder_of_this_package_is_told_so() -> None:
    with pytest.raises(VtensorsError, match="decoders of this package"):
        _require_decoder(object())  # type: ignore[arg-type]
