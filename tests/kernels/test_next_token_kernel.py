"""The next-token kernel in the emulator: the reference's indices, ties, NaN; which rows move on and which do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_kernels.reference.next_token import next_token
from vtensors_kernels.steps.next_token import MAX_BLOCKS, THREADS, NextToken, blocks_of

HALVES = [torch.bfloat16, torch.float16]


class Rows:
    """tokens, positions and largest of some rows, and the kernel's counters."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.arange(count) - 100
        self.positions = torch.arange(count, dtype=torch.int32) + 5
        self.largest = torch.full((count,), 77.0)
        self.counters = torch.zeros(count, dtype=torch.int32)

    def advance(self, logits: Tensor, steps: Tensor, *, blocks: int | None = None, seed: int = 0) -> Rows:
        rows, columns = logits.shape
        blocks = blocks or blocks_of(columns)
        partial = torch.full((rows, blocks), -1)
        state = [self.tokens, self.positions, steps, self.largest, partial, self.counters]
        defines, stride = {"VT_F16": int(logits.dtype == torch.float16)}, logits.stride(0)
        emulate(
            "common/next_token.cu",
            "next_token",
            defines,
            (blocks, rows),
            (THREADS,),
            [logits, *state, stride, columns],
            seed=seed,
        )
        assert self.counters.eq(0).all()
        return self


def check(logits: Tensor, *, blocks: int | None = None, seed: int = 0) -> None:
    rows = logits.shape[0]
    steps = (torch.arange(rows, dtype=torch.int32) + 1) % 3
    ours, wanted = Rows(rows).advance(logits, steps, blocks=blocks, seed=seed), Rows(rows)
    next_token(logits, wanted.tokens, wanted.positions, steps, wanted.largest)
    assert torch.equal(ours.tokens, wanted.tokens)
    assert torch.equal(ours.positions, wanted.positions)
    assert torch.equal(ours.largest.nan_to_num(nan=-7), wanted.largest.nan_to_num(nan=-7))


def random_logits(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 255, 2049, 16385, 40000])
def test_rows_of_any_length_give_the_references_token(columns: int, dtype: torch.dtype) -> None:
    check(random_logits(4, columns, dtype))


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2, 5, MAX_BLOCKS])
def test_the_number_of_blocks_and_the_order_of_threads_change_nothing(blocks: int) -> None:
    logits = random_logits(3, 20003, torch.bfloat16)
    check(logits, blocks=blocks)
    check(logits, blocks=blocks, seed=1)


@needs_compiler
@pytest.mark.parametrize("columns", [600, 20000])
def test_the_lowest_index_wins_among_equal_logits(columns: int) -> None:
    logits = random_logits(6, columns, torch.bfloat16)
    top = logits.max()
    logits[0, columns // 2] = logits[0, columns - 1] = logits[0, 17] = top
    logits[1, columns - 1] = logits[1, columns - 2] = top
    logits[2] = -0.0
    logits[2, 5:] = 0.0
    logits[3] = float("-inf")
    logits[4] = float("inf")
    check(logits)
    assert Rows(6).advance(logits, torch.ones(6, dtype=torch.int32)).tokens[0] == 17


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_nan_ranks_above_every_number(dtype: torch.dtype) -> None:
    logits = random_logits(5, 9000, dtype)
    logits[0, 4000] = float("nan")
    logits[1] = float("nan")
    logits[2] = -float("nan")
    logits[2, 8000] = float("-inf")
    logits[3] = float("nan")
    logits[3, 3] = -5.0
    logits[4, 0] = float("nan")
    check(logits)
    rows = Rows(5).advance(logits, torch.ones(5, dtype=torch.int32))
    assert rows.tokens.tolist() == [4000, 0, 0, 0, 0]
    assert rows.largest.isnan().all()


@needs_compiler
def test_rows_may_be_slices_at_any_even_address() -> None:
    logits = random_logits(3, 5001, torch.bfloat16)
    wide = torch.full((3, 5101), float("nan"), dtype=torch.bfloat16)
    for first in range(9):
        wide[:, first : first + 5001] = logits
        check(wide[:, first : first + 5001])


@needs_compiler
def test_a_row_without_steps_keeps_its_token_and_place_but_tells_its_largest_logit() -> None:
    logits = random_logits(2, 300, torch.bfloat16)
    rows = Rows(2).advance(logits, torch.tensor([0, 1], dtype=torch.int32))
    assert rows.tokens.tolist() == [-100, int(logits[1].argmax())]
    assert rows.positions.tolist() == [5, 7]
    assert torch.equal(rows.largest, logits.amax(-1).float())


def test_more_columns_get_more_blocks_up_to_a_limit() -> None:
    assert [blocks_of(n) for n in (1, 8192, 8193, 248320, 10**7)] == [1, 1, 2, 31, MAX_BLOCKS]


def test_another_device_is_refused() -> None:
    with pytest.raises(RequestError, match="CUDA"):
        NextToken("cpu", torch.bfloat16)
