"""The gated delta net kernels on a CUDA device: the real shapes, rows at any B, prompt against steps, dirty slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gated_delta_cases import (
    HALVES,
    Inputs,
    check,
    decoded,
    dirty_slots,
    expected,
    integers,
    make_inputs,
    make_kernel,
    ring_in_order,
)
from vtensors_kernels.steps.gated_delta_net import GatedDeltaNetKernel
from vtensors_kernels.steps.gated_delta_probe import probe_gated_delta_net
from vtensors_kernels.steps.next_token import NextToken

pytestmark = pytest.mark.gpu
REAL = [(16, 48, 128, 128, 4), (16, 32, 128, 128, 4)]
OTHERS = [(2, 6, 32, 32, 4), (1, 2, 48, 144, 8), (2, 2, 256, 256, 3), (3, 3, 16, 16, 2), (1, 5, 144, 80, 5)]
SHAPES = REAL + OTHERS
IDS = ["x".join(map(str, shape)) for shape in SHAPES]
Shape = tuple[int, int, int, int, int]


def prefilled(
    kernel: GatedDeltaNetKernel, inputs: Inputs, state: tuple[Tensor, Tensor], slot: int, start: int = 0
) -> Tensor:
    """Output rows of one prefill call."""
    shape = inputs.qkv.shape[0], kernel.form.value_width
    out = torch.full(shape, float("nan"), dtype=kernel.dtype, device=kernel.device)
    return kernel.prefill(*inputs.all(), *state, integers(kernel, slot), integers(kernel, start), out)


def require_same(ours: tuple[Tensor, ...], others: tuple[Tensor, ...], what: str) -> None:
    """Asserts that all pairs are equal bit for bit, NaN (a slot never used) among equal values."""
    for i, (a, b) in enumerate(zip(ours, others, strict=True)):
        same = (a == b) | (a.isnan() & b.isnan())
        assert bool(same.all()), f"{what}, tensor {i}: {int((~same).sum())} of {same.numel()} differ"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_steps_and_prompts_follow_the_reference_and_each_other(shape: Shape, dtype: torch.dtype) -> None:
    kernel = make_kernel(*shape, dtype=dtype, device="cuda")
    inputs, one, many = make_inputs(kernel, 13), dirty_slots(kernel, 3), dirty_slots(kernel, 3)
    ours = decoded(kernel, inputs, one, slot=1)
    wanted, history, memory = expected(kernel, inputs)
    check(ours, wanted, dtype)
    check(one[1][1], memory, dtype)
    assert torch.equal(ring_in_order(one[0][1], 13).cpu(), history)
    assert bool(one[0][::2].isnan().all() and one[1][::2].isnan().all()), "another slot was written"
    require_same((prefilled(kernel, inputs, many, slot=1), *many), (ours, *one), "prompt against steps")


@pytest.mark.parametrize("shape", REAL, ids=IDS[:2])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 70, 1030])
def test_a_prompt_gives_the_bits_of_its_tokens_from_any_position(tokens: int, shape: Shape) -> None:
    kernel = make_kernel(*shape, device="cuda")
    for start in (0, 2, 9):
        inputs = make_inputs(kernel, start + tokens, seed=start)
        one, many = dirty_slots(kernel, 2), dirty_slots(kernel, 2)
        before = decoded(kernel, inputs.rows(0, start), one, slot=1) if start else None
        if start:
            require_same((prefilled(kernel, inputs.rows(0, start), many, slot=1),), (before,), "before")
        rest = inputs.rows(start, start + tokens)
        ours = prefilled(kernel, rest, many, slot=1, start=start)
        wanted = decoded(kernel, rest, one, slot=1, start=start)
        require_same((ours, *many), (wanted, *one), f"{tokens} tokens from {start}")


@pytest.mark.parametrize("columns", [(1, 16), (2, 32), (2, 64), (4, 64), (4, 128)], ids=str)
def test_a_prompt_gives_the_same_bits_however_columns_are_dealt_out(columns: tuple[int, int]) -> None:
    kernel = make_kernel(*REAL[0], device="cuda")
    other = make_kernel(*REAL[0], device="cuda", prefill_columns=columns)
    inputs, many, one = make_inputs(kernel, 70), dirty_slots(kernel, 1), dirty_slots(kernel, 1)
    wanted = prefilled(kernel, inputs, one, slot=0)
    require_same((prefilled(other, inputs, many, slot=0), *many), (wanted, *one), str(columns))


@pytest.mark.parametrize("shape", [*REAL, OTHERS[0]], ids=[*IDS[:2], IDS[2]])
def test_a_row_is_the_same_bits_at_any_number_of_rows_and_place(shape: Shape) -> None:
    kernel = make_kernel(*shape, device="cuda")
    state = dirty_slots(kernel, 33)
    starts = [i % 7 for i in range(32)]
    for i, start in enumerate(starts):
        if start:
            prefilled(kernel, make_inputs(kernel, start, seed=i), state, slot=i)
    inputs = make_inputs(kernel, 32, seed=99)
    slots, positions = integers(kernel, *range(32)), integers(kernel, *starts)

    def step(rows: Inputs, where: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moved = state[0].clone(), state[1].clone()
        out = torch.full(
            (len(where), kernel.form.value_width), float("nan"), dtype=kernel.dtype, device="cuda"
        )
        return kernel.decode(*rows.all(), *moved, where, at, out), *moved

    whole, history, memory = step(inputs, slots, positions)
    assert bool(torch.isfinite(whole.float()).all())
    for count in range(1, 32):
        out, *moved = step(inputs.rows(0, count), slots[:count], positions[:count])
        parts = (whole[:count], history[:count], memory[:count])
        require_same((out, moved[0][:count], moved[1][:count]), parts, f"{count} rows")
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).cuda()
    shuffled = step(inputs.at(order), slots[order], positions[order])
    require_same(shuffled, (whole[order], history, memory), "another order")
    # The rows from 20 on are padding, all in the dummy slot, whose inputs are NaN.
    padded = inputs.at(torch.arange(32, device="cuda"))
    padded.qkv[20:] = float("nan")
    where = torch.where(torch.arange(32, device="cuda") < 20, slots, 32).to(torch.int32)
    out, *moved = step(padded, where, positions)
    require_same((out[:20], moved[0][:20], moved[1][:20]), (whole[:20], history[:20], memory[:20]), "padding")
    require_same((moved[0][20:32], moved[1][20:32]), (state[0][20:32], state[1][20:32]), "untouched slots")


def test_a_slot_used_again_is_as_a_fresh_one() -> None:
    kernel = make_kernel(*REAL[0], device="cuda")
    state, fresh = dirty_slots(kernel, 1), dirty_slots(kernel, 1)
    prefilled(kernel, make_inputs(kernel, 50, seed=1, spread=30.0), state, slot=0)
    inputs = make_inputs(kernel, 9)
    ours, wanted = decoded(kernel, inputs, state, slot=0), decoded(kernel, inputs, fresh, slot=0)
    require_same((ours, *state), (wanted, *fresh), "a used slot")


def test_a_graph_of_steps_that_move_positions_on_gives_the_bits_of_single_steps() -> None:
    kernel = make_kernel(*REAL[1], device="cuda")
    inputs, one, many = make_inputs(kernel, 12), dirty_slots(kernel, 1), dirty_slots(kernel, 1)
    wanted = decoded(kernel, inputs, one, slot=0)
    slot, position = integers(kernel, 0), integers(kernel, 0)
    row = Inputs(**{name: getattr(inputs, name)[:1].clone() for name in ("qkv", "z", "b", "a")})
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        kernel.decode(*row.all(), *dirty_slots(kernel, 1), slot, position)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = kernel.decode(*row.all(), *many, slot, position)
            position += 1
        rows = []
        for t in range(12):
            for name in ("qkv", "z", "b", "a"):
                getattr(row, name).copy_(getattr(inputs, name)[t : t + 1])
            graph.replay()
            rows.append(out.clone())
        stream.synchronize()
    require_same((torch.cat(rows), *many), (wanted, *one), "the graph")


class Mover:
    """Adds to int32 tensors in a kernel that lets the next one start at once and writes at its end."""

    def __init__(self, kernel: GatedDeltaNetKernel, rows: int) -> None:
        self._next = NextToken("cuda", kernel.dtype)
        self._logits = torch.randn(rows, 150_000, device="cuda").to(kernel.dtype)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self._largest = torch.zeros(rows, device="cuda")

    def __call__(self, numbers: Tensor, steps: Tensor) -> None:
        self._next(self._logits, self._tokens, numbers, steps, self._largest)


@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("shape", [*REAL, OTHERS[1]], ids=[*IDS[:2], IDS[3]])
def test_steps_right_behind_kernels_that_move_slots_and_positions_are_right(shape: Shape, rows: int) -> None:
    kernel = make_kernel(*shape, device="cuda")
    state = dirty_slots(kernel, rows + 1)
    starts = [i % 7 for i in range(rows)]
    for i, start in enumerate(starts):
        if start:
            prefilled(kernel, make_inputs(kernel, start, seed=i), state, slot=i)
    first, second = make_inputs(kernel, rows, seed=98), make_inputs(kernel, rows, seed=99)
    slots, positions = integers(kernel, *range(rows)), integers(kernel, *starts)
    own = [x.clone() for x in state]
    wanted = [
        kernel.decode(*first.all(), *own, slots, positions),
        kernel.decode(*second.all(), *own, slots, positions + 1),
    ]
    move, later, place = Mover(kernel, rows), positions + 1, (slots.clone(), positions.clone())
    by = torch.zeros_like(slots), torch.zeros_like(slots)
    moved = [x.clone() for x in state]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> list[Tensor]:
        for numbers, steps in zip(place, by, strict=True):
            move(numbers, steps)
        # The second finds the state that the first leaves.
        ours = kernel.decode(*first.all(), *moved, *place)
        return [ours, kernel.decode(*second.all(), *moved, slots, later)]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            held = step()
        for slot in (slots, slots.flip(0), slots + 1, slots + 1000, slots - 1000):
            for position in (positions, positions - 1, positions + 9, positions * 0, positions - 1000):
                for replayed in (True, False):
                    told = (slot, position, slots - slot, positions - position)
                    for x, source in zip((*place, *by), told, strict=True):
                        x.copy_(source)
                    for x, source in zip(moved, state, strict=True):
                        x.copy_(source)
                    if replayed:
                        graph.replay()
                    ours = held if replayed else step()
                    stream.synchronize()
                    what = f"told {slot.tolist()} at {position.tolist()}, replayed: {replayed}"
                    require_same((*ours, *moved), (*wanted, *own), what)


def test_a_graph_of_steps_each_behind_the_kernel_that_moves_positions_on() -> None:
    kernel = make_kernel(*REAL[0], device="cuda")
    inputs, one, many = make_inputs(kernel, 24), dirty_slots(kernel, 2), dirty_slots(kernel, 2)
    wanted = decoded(kernel, inputs, one, slot=1)
    move, slot, position = Mover(kernel, 1), integers(kernel, 1), integers(kernel, 0)
    ones = torch.ones_like(position)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel.decode(*inputs.rows(0, 1).all(), *dirty_slots(kernel, 2), slot, position)
        move(position, ones)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            rows = []
            for t in range(24):
                rows.append(kernel.decode(*inputs.rows(t, t + 1).all(), *many, slot, position))
                move(position, ones)
        for _ in range(5):
            for x in many:
                x.fill_(float("nan"))
            position.zero_()
            graph.replay()
            stream.synchronize()
            require_same((torch.cat(rows), *many), (wanted, *one), "the graph")


@pytest.mark.parametrize("shape", REAL, ids=IDS[:2])
def test_the_self_test_passes(shape: Shape) -> None:
    for dtype in HALVES:
        probe_gated_delta_net(make_kernel(*shape, dtype=dtype, device="cuda"))
