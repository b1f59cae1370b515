"""Pages, slots and rows: nothing is given out twice, nothing is lost, and rows stay one dense block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtensors.errors import VtensorsError
from vtensors_engine.pages import DUMMY_PAGE, PageAllocator
from vtensors_engine.rows import BUCKETS, RowTable, bucket_for
from vtensors_engine.slots import SlotAllocator


@given(st.integers(2, 20), st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=60))
def test_pages_are_given_to_one_owner_at_a_time_and_come_back(
    pages: int, actions: list[tuple[bool, int]]
) -> None:
    allocator = PageAllocator(pages)
    held: list[tuple[int, ...]] = []
    for take, number in actions:
        if take:
            free = allocator.free_pages
            found = allocator.allocate(number)
            assert (found is None) == (number > free)
            if found is not None:
                assert len(found) == number
                held.append(found)
        elif held:
            allocator.free(held.pop(number % len(held)))
        given_out = [page for owned in held for page in owned]
        assert len(set(given_out)) == len(given_out) == allocator.used_pages
        assert set(given_out) <= set(range(1, pages))
        assert allocator.free_pages + allocator.used_pages == allocator.capacity == pages - 1
    for owned in held:
        allocator.free(owned)
    assert allocator.allocate(allocator.capacity) == tuple(range(1, pages))


def test_a_page_comes_back_once_and_only_from_its_owner() -> None:
    allocator = PageAllocator(6)
    owned = allocator.allocate(3)
    assert owned is not None
    for wrong in ([DUMMY_PAGE], [5], [owned[0], owned[0]], [owned[0], 17], [-1]):
        with pytest.raises(VtensorsError, match="not given out"):
            allocator.free(wrong)
        assert allocator.used_pages == 3
    allocator.free(owned)
    with pytest.raises(VtensorsError, match="not given out"):
        allocator.free(owned)
    assert allocator.free_pages == 5


def test_a_sequence_takes_whole_pages_and_at_least_one() -> None:
    allocator = PageAllocator(4, page_size=64)
    assert [allocator.pages_for(tokens) for tokens in (1, 63, 64, 65, 128, 129)] == [1, 1, 1, 2, 2, 3]
    with pytest.raises(VtensorsError, match="at least one page"):
        allocator.allocate(0)
    for pages, size in ((1, 64), (2, 0)):
        with pytest.raises(VtensorsError, match="holds no token"):
            PageAllocator(pages, size)


@given(st.integers(2, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_slots_are_given_to_one_owner_at_a_time_and_never_the_dummy(
    slots: int, actions: list[tuple[bool, int]]
) -> None:
    allocator = SlotAllocator(slots)
    held: list[int] = []
    for take, number in actions:
        if take:
            found = allocator.allocate()
            assert (found is None) == (len(held) == slots - 1)
            held += [] if found is None else [found]
        elif held:
            allocator.free(held.pop(number % len(held)))
        assert len(set(held)) == len(held) == allocator.used_slots
        assert allocator.dummy not in held
        assert allocator.free_slots + allocator.used_slots == allocator.capacity == slots - 1


def test_a_slot_comes_back_once_and_only_from_its_owner() -> None:
    allocator = SlotAllocator(3)
    slot = allocator.allocate()
    assert slot == 0
    for wrong in (allocator.dummy, 1, -1, 3):
        with pytest.raises(VtensorsError, match="not given out"):
            allocator.free(wrong)
    allocator.free(slot)
    with pytest.raises(VtensorsError, match="not given out"):
        allocator.free(slot)
    with pytest.raises(VtensorsError, match="holds no sequence"):
        SlotAllocator(1)


def test_the_bucket_is_the_smallest_that_holds_the_rows() -> None:
    for count in range(1, 65):
        bucket = bucket_for(count)
        assert bucket >= count
        assert not any(count <= other < bucket for other in BUCKETS)
    assert bucket_for(3, (2, 5)) == 5
    for count in (0, 65):
        with pytest.raises(VtensorsError, match=f"{count} rows"):
            bucket_for(count)


@given(st.lists(st.lists(st.integers(0, 11), max_size=8, unique=True), max_size=30))
def test_rows_are_a_dense_block_and_the_changes_made_in_any_order_give_it(batches: list[list[int]]) -> None:
    table = RowTable(8)
    # What a device holds: the state of a sequence at its row.
    states: dict[int, int] = {}
    for handles in batches:
        before = table.handles
        changes = table.assign(handles)
        assert sorted(table.handles) == sorted(handles)
        assert table.count == len(handles)
        assert [table.row(handle) for handle in table.handles] == list(range(len(handles)))
        for change in reversed(changes):
            if change.source is not None:
                assert change.row < table.count <= change.source
                assert before[change.source] == change.handle
            else:
                assert change.handle not in before
            states[change.row] = change.handle if change.source is None else states[change.source]
        assert [states[row] for row in range(table.count)] == list(table.handles)
        # One that stays is moved only where the block shrinks past it.
        moved = [change for change in changes if change.source is not None]
        assert len(moved) == sum(row >= len(handles) and h in handles for row, h in enumerate(before))
    assert table.assign(table.handles) == ()


def test_the_row_of_a_leaving_sequence_is_filled_by_the_last_one() -> None:
    table = RowTable(4)
    table.assign([7, 8, 9])
    (change,) = table.assign([8, 9])
    assert (change.row, change.handle, change.source) == (0, 9, 2)
    (change,) = table.assign([9, 5])
    assert (change.row, change.handle, change.source) == (1, 5, None)
    with pytest.raises(VtensorsError, match="handle 8"):
        table.row(8)
    for wrong in ([1, 2, 3, 4, 5], [1, 1]):
        with pytest.raises(VtensorsError, match="cannot have rows"):
            table.assign(wrong)
    assert table.handles == (9, 5)
