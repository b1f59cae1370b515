"""Forms and grids of the two kernels of a batch of experts: what fits which device, and which batches they are for."""

from __future__ import annotations

import attrs
import pytest

from experts_cases import packed_reference, random_experts
from vtensors_kernels.compiling.architectures import COMPILED, PORTABLE, SHARED_KIB
from vtensors_kernels.experts.batch_form import (
    MOST_TOKENS,
    gate_up_form,
    gate_up_grid,
    is_batch,
    most_outputs_bytes,
    outputs_form,
    outputs_grid,
)
from vtensors_kernels.experts.batch_launches import BatchLaunches
from vtensors_kernels.experts.form import MOST_PAIRS, ExpertsTuning

NVFP4, FP8 = 1152, 2048
STATIC = 14 << 10


@pytest.mark.parametrize("block_bytes", [NVFP4, FP8, FP8 + 64])
@pytest.mark.parametrize("target", [*COMPILED, PORTABLE])
def test_the_mixture_of_the_35b_is_served_on_every_target(target: str, block_bytes: int) -> None:
    most = SHARED_KIB.get(target, 99) << 10
    up, out = gate_up_form(2048, block_bytes, target), outputs_form(512, block_bytes, target)
    up_grid = gate_up_grid(up, block_bytes, 100, target)
    assert up_grid is not None
    assert up_grid.stages >= 2
    assert (up_grid.shared_bytes + STATIC + 1024) * (up_grid.blocks // 100) <= most + 1024
    for m in (1, 8, MOST_TOKENS):
        grid = outputs_grid(out, block_bytes, 2048, m, 8, 9, 132, target)
        assert grid is not None
        assert grid.blocks * grid.tiles >= 128
        assert grid.shared_bytes <= most_outputs_bytes(target) <= most - STATIC


@pytest.mark.parametrize("block_bytes", [NVFP4, FP8])
def test_every_width_has_forms_that_compile(block_bytes: int) -> None:
    for k in (*range(8, 1300, 8), 2048, 2560, 4096, 5120, 7168, 16384):
        for form in (gate_up_form(k, block_bytes, "sm_90a"), outputs_form(k, block_bytes, "sm_90a")):
            segments = 4 if form.steps <= 4 else 8
            assert segments % form.split == 0 == form.warps % form.split
            assert form.split <= form.steps
            assert form.split == 1 or form.warps // form.split <= 15
            own = -(-form.steps // form.split)
            assert not form.held or (form.steps % segments == 0 and own <= 4)


def test_outputs_with_many_rows_on_a_small_device_take_more_blocks_than_run_at_a_time() -> None:
    form = outputs_form(512, NVFP4, "sm_86")
    grid = outputs_grid(form, NVFP4, 4096, 32, 8, 9, 4, "sm_86")
    assert grid is not None
    assert grid.blocks > 4
    assert grid.blocks * grid.tiles >= 256


def test_batches_are_up_to_32_tokens_of_so_many_pairs_that_it_pays() -> None:
    assert not is_batch(5, 8, NVFP4)
    assert is_batch(6, 8, NVFP4)
    assert not is_batch(8, 8, FP8)
    assert is_batch(9, 8, FP8)
    assert is_batch(32, 8, FP8)
    assert not is_batch(33, 4, NVFP4)
    assert not is_batch(32, 9, NVFP4)
    assert is_batch(1, 1, NVFP4, 1)
    assert not is_batch(32, 8, NVFP4, MOST_PAIRS + 1)


def test_where_no_ring_fits_nothing_is_compiled_and_no_batch_is_served() -> None:
    packed = packed_reference(random_experts("nvfp4", 3, 64, 32), 3)
    big = attrs.evolve(gate_up_form(64, NVFP4, "sm_86"), warps=16, stage_blocks=8)
    assert gate_up_grid(big, NVFP4, 4, "sm_86") is None
    launches = BatchLaunches(
        packed=packed, target="sm_86", multiprocessors=4, tuning=ExpertsTuning(batch=(big, None))
    )
    assert launches.wanted(0) == {}
    assert not launches.serve(32, 8)
    served = BatchLaunches(packed=packed, target="sm_86", multiprocessors=4, tuning=ExpertsTuning())
    names = [one.name for one in served.wanted(0).values()]
    assert names == ["experts_gate_up_nvfp4", "experts_outputs_nvfp4"]


def test_a_form_of_long_rows_overlaps_its_stages() -> None:
    for k, stages in ((512, 1), (1536, 2)):
        grid = outputs_grid(outputs_form(k, NVFP4, "sm_90a"), NVFP4, 2048, 32, 8, 9, 132, "sm_90a")
        assert grid is not None
        assert grid.stages == stages
