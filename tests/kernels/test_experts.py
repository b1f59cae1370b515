"""The op `experts` on any device: its reference, stacking of experts, and the grids of its launches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import attrs
import pytest
import torch

from experts_cases import SCHEMES, outputs, packed_reference, random_choice, random_experts
from vtensors.errors import RequestError
from vtensors_formats.fp8 import FP8Weight
from vtensors_formats.nvfp4 import NVFP4Weight
from vtensors_kernels.compiling.architectures import COMPILED, SHARED_KIB
from vtensors_kernels.compiling.functions import Wanted
from vtensors_kernels.experts import launches
from vtensors_kernels.experts.arguments import checked_column
from vtensors_kernels.experts.form import (
    MOST_DOWN_BYTES,
    MOST_EXPERTS,
    balanced_tiles,
    down_form,
    down_grid,
    form_for,
    group_bytes,
    linear_grid,
    most_experts,
    most_items,
    tokens_at_a_time,
)
from vtensors_kernels.experts.packed import check_experts, stacked
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.reference.experts import experts
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.swiglu import swiglu


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_the_reference_is_the_sum_of_the_chosen_experts(inside: bool) -> None:
    weights = random_experts("nvfp4", 4, 64, 32, shared=inside)
    x, gate, residual = torch.randn(5, 64), torch.randn(5, 1), torch.randn(5, 64)
    shared = None if inside else torch.randn(5, 64)
    chosen, router = random_choice(5, 4, 2)
    ours = experts(x, chosen, router, gate, shared, residual, weights, 4)
    torch.testing.assert_close(ours, outputs(weights, 4, x, chosen, router, gate, shared, residual))


def test_the_reference_sums_in_ascending_order_of_experts() -> None:
    weights = random_experts("fp8-row", 3, 64, 32)
    x, router = torch.randn(1, 64), torch.tensor([[0.5, 0.25, 0.25]])

    def expert(index: int) -> torch.Tensor:
        gate, up, down = weights[3 * index : 3 * index + 3]
        return linear(swiglu(linear(x, gate), linear(x, up)), down)

    wanted = torch.zeros(1, 64)
    for index, weight in ((0, 0.25), (1, 0.25), (2, 0.5)):
        wanted = wanted + expert(index) * weight
    ours = experts(x, torch.tensor([[2, 1, 0]]), router, None, None, None, weights, 3)
    assert torch.equal(ours, wanted)


def test_a_shared_expert_is_given_once() -> None:
    weights = random_experts("nvfp4", 2, 64, 32, shared=True)
    x = torch.randn(1, 64)
    with pytest.raises(RequestError, match="among the weights"):
        experts(x, torch.tensor([[0]]), torch.ones(1, 1), None, x, None, weights, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stacked_experts_have_the_values_that_each_had(scheme: str) -> None:
    weights = random_experts(scheme, 3, 256, 128)[::3]
    whole = stacked(weights)
    assert whole.shape == (3 * 128, 256)
    wanted = torch.cat([weight.dequantize(torch.float32) for weight in weights])
    assert torch.equal(whole.dequantize(torch.float32), wanted)


def test_divisors_and_multipliers_stack() -> None:
    first, second, *_ = random_experts("nvfp4", 1, 64, 32)
    assert isinstance(first, NVFP4Weight)
    divided = attrs.evolve(first, global_scale=None, global_divisor=torch.tensor(4.0))
    whole = stacked([divided, second])
    wanted = torch.cat([divided.dequantize(torch.float32), second.dequantize(torch.float32)])
    assert torch.equal(whole.dequantize(torch.float32), wanted)


def test_matrices_of_different_kinds_are_not_stacked() -> None:
    one, two = random_experts("nvfp4", 1, 64, 32)[0], random_experts("fp8-row", 1, 64, 32)[0]
    with pytest.raises(RequestError, match="different schemes"):
        stacked([one, two])
    block = FP8Weight(
        codes=torch.zeros(96, 128).to(torch.float8_e4m3fn), scale=torch.ones(1, 1), block=(128, 128)
    )
    with pytest.raises(RequestError, match="spans two experts"):
        stacked([block, block])


def test_experts_that_differ_or_leave_tiles_open_are_refused() -> None:
    weights = random_experts("nvfp4", 2, 64, 32)
    with pytest.raises(RequestError, match="not the weights"):
        check_experts(weights, 3)
    with pytest.raises(RequestError, match="differ in shape"):
        check_experts([*weights[:3], *random_experts("nvfp4", 1, 64, 48)], 2)
    with pytest.raises(RequestError, match="does not fill its row tiles"):
        check_experts(random_experts("fp8-row", 1, 64, 20), 1)
    with pytest.raises(RequestError, match="bias"):
        check_experts([*weights[:5], attrs.evolve(weights[5], bias=torch.ones(64))], 2)


def test_packed_experts_tell_their_bytes() -> None:
    packed = packed_reference(random_experts("nvfp4", 2, 256, 64, shared=True), 2)
    assert (packed.hidden, packed.width, packed.experts, packed.shared) == (256, 64, 2, True)
    assert packed.nbytes == 3 * ((8 * 2 + 16 * 1) * 1152 + 4 * (128 + 256))


@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 31])
def test_a_grid_covers_every_row_tile_of_every_item(m: int) -> None:
    for n, k in ((1024, 2048), (2048, 512), (272, 48)):
        form = form_for(k, 1152, many=False)
        grid = linear_grid(form, n, m, 8, 256, 132, many=False, shared=True)
        assert grid.grid[0] * grid.tiles >= n // 16 > (grid.grid[0] - 1) * grid.tiles
        assert grid.grid[1] == grid.bound + -(-m // 8)
        assert grid.bound == 8 * m
        assert grid.shared_bytes <= 48 << 10


@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 8])
def test_all_blocks_of_a_few_tokens_run_at_a_time(m: int) -> None:
    form = form_for(2048, 1152, many=False)
    most = form.most_tiles_at_a_time("sm_90a")
    grid = linear_grid(form, 1024, m, 8, 256, 132, many=False, shared=True, most=most)
    assert grid.grid[0] * grid.grid[1] <= 264
    assert 2 * (grid.shared_bytes + 5120) <= 228 << 10


@pytest.mark.parametrize("target", [*COMPILED, "compute_80"])
@pytest.mark.parametrize("k", [512, 2048])
def test_blocks_that_must_run_at_a_time_fit_the_shared_memory(target: str, k: int) -> None:
    form = form_for(k, 1152, many=False)
    most = form.most_tiles_at_a_time(target)
    lists = 512 * form.threads // 32
    assert form.most_tiles <= most
    assert (
        form.blocks_per_sm * (form.shared_bytes(most) + lists + 1024)
        <= (SHARED_KIB.get(target, 99) + 1) << 10
    )
    assert form.shared_bytes(most) <= form.most_shared_bytes <= (99 << 10) - lists


@pytest.mark.parametrize(
    ("items", "tiles"), [(9, 3), (8, 2), (17, 5), (33, 8), (65, 16), (66, 16), (67, None)]
)
def test_blocks_are_as_many_as_run_at_a_time(items: int, tiles: int | None) -> None:
    assert balanced_tiles(64, items, 132, 2, range(1, 17)) == tiles
    if tiles is not None:
        assert -(-64 // tiles) * items <= 264 < -(-64 // (tiles - 1)) * items


@pytest.mark.parametrize("k", [32, 512, 768])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 12])
def test_a_grid_of_downs_covers_every_row_tile_of_every_token(m: int, k: int) -> None:
    grid = down_grid(down_form(k, 1152), 2048, k, m, 9, 132)
    assert grid is not None
    assert grid.grid[0] * grid.tiles >= 128 > (grid.grid[0] - 1) * grid.tiles
    assert grid.grid[1] == m
    assert grid.shared_bytes <= MOST_DOWN_BYTES
    assert grid.tiles == 1 or grid.grid[0] * m <= 264


def test_there_is_no_grid_for_more_than_a_block_has_room_for() -> None:
    assert down_grid(down_form(512, 1152), 2048, 512, 1, 17, 132) is None
    assert down_grid(down_form(2048, 1152), 2048, 2048, 1, 11, 132) is None
    last = down_grid(down_form(2048, 1152), 2048, 2048, 12, 10, 132)
    assert last is not None
    assert last.tiles == 1


@pytest.mark.parametrize(
    ("gate", "fits"),
    [
        (torch.zeros(3, 5).bfloat16()[:, 2:3], True),
        (torch.zeros(3).bfloat16(), True),
        (torch.zeros(3, 1), False),
        (torch.zeros(4, 1).bfloat16(), False),
        (torch.zeros(1, 3).bfloat16(), False),
    ],
    ids=["strided", "flat", "wide", "long", "lying"],
)
def test_a_gate_is_taken_where_it_lies_or_refused(gate: torch.Tensor, fits: bool) -> None:
    packed = packed_reference(random_experts("nvfp4", 2, 64, 32), 2)
    if not fits:
        with pytest.raises(RequestError, match="the gate does not fit"):
            checked_column(packed, torch.bfloat16, gate, 3)
        return
    column = checked_column(packed, torch.bfloat16, gate, 3)
    assert column is not None
    assert (column.shape, column.data_ptr(), column.stride(0)) == ((3,), gate.data_ptr(), gate.stride(0))


@pytest.mark.fault("B85")
@pytest.mark.parametrize("target", [*COMPILED, "compute_80"])
def test_the_table_that_groups_pairs_fits_every_device(target: str) -> None:
    most = most_experts(target)
    assert group_bytes(most) + 128 <= SHARED_KIB.get(target, 99) << 10
    assert most == MOST_EXPERTS or most >= 768


@pytest.mark.fault("B85")
@pytest.mark.parametrize("experts", [8, 256])
def test_a_load_asks_for_no_more_shared_memory_than_its_experts_need(
    experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Wanted] = []

    def compiled(wanted: Sequence[Wanted], _index: int) -> tuple[SimpleNamespace, ...]:
        asked.extend(wanted)
        return tuple(SimpleNamespace() for _ in wanted)

    on_cuda = SimpleNamespace(type="cuda", index=0)
    matrix = SimpleNamespace(blocks=SimpleNamespace(device=on_cuda), shape=(64, 64))
    packed = SimpleNamespace(
        gate_up=matrix, down=matrix, experts=experts, hidden=64, width=64, shared=False, format=FORMAT
    )
    monkeypatch.setattr(launches, "compile_many", compiled)
    properties = SimpleNamespace(multi_processor_count=48, major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    launches.GroupedExperts(packed, torch.bfloat16)  # type: ignore[arg-type]
    assert {one.name: one.shared_bytes for one in asked}["experts_group"] == 128 * experts
    assert max(one.shared_bytes for one in asked) <= 99 << 10


@pytest.mark.parametrize("top", [1, 2, 8, 16, 17, 200, 1024])
def test_a_grid_has_as_many_blocks_as_a_device_takes(top: int) -> None:
    for m in (1, 256 // top + 1, 2047, 100_000):
        own = min(m, tokens_at_a_time(m, top))
        assert own >= 1
        many = own * top > 256
        form = form_for(2048, 2048, many=many)
        grid = linear_grid(form, 1024, own, top, max(top, 256), 132, many=many, shared=True)
        assert grid.grid[1] <= 65535
        assert own == m or own == min(2048, (1 << 15) // top)


def test_items_never_exceed_their_bound() -> None:
    source = torch.Generator().manual_seed(0)
    for tokens in (8, 32):
        for pairs in (1, 31, 32, 33, 700):
            counts = torch.bincount(torch.randint(0, 16, (pairs,), generator=source), minlength=16)
            assert int((-(-counts // tokens)).sum()) <= most_items(pairs, 16, tokens)
        assert most_items(16 * (tokens + 1), 16, tokens) >= 32
