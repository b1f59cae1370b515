"""The grouped experts on the emulator, with the forms and grids of a launch: results, bits of a token, hostile ids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import needs_compiler
from experts_cases import SCHEMES, outputs, packed_reference, random_choice, random_experts
from experts_emulated import run
from vtensors_kernels.probing import TOLERANCES

pytestmark = needs_compiler

# Features of x and of an expert: a few column steps with a tail and without, more than four of them.
SHAPES = {"short": (272, 48), "whole": (256, 128), "long": (1184, 160)}


def _inputs(m: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(m + hidden)
    x, beside, shared, residual = (
        torch.randn(m, columns, generator=source).to(dtype) for columns in (hidden, 3, hidden, hidden)
    )
    # The gate is a column of wider rows, as a router's linear makes it.
    return x, beside[:, 1:2], shared, residual


def _check(ours: Tensor, wanted: Tensor) -> None:
    error = (ours.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.max()) < TOLERANCES[ours.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_gives_the_reference_and_the_same_bits(scheme: str, dtype: torch.dtype) -> None:
    hidden, width = (256, 128) if scheme == "fp8-block" else (1184, 160)
    weights = random_experts(scheme, 4, hidden, width, shared=True)
    packed = packed_reference(weights, 4)
    x, gate, _, residual = _inputs(13, hidden, dtype)
    chosen, router = random_choice(13, 4, 2)
    act, out = run(packed, x, chosen, router, gate, None, residual)
    _check(out, outputs(weights, 4, x, chosen, router, gate, None, residual))
    for many, tiles in ((False, 4), (True, None)):
        others = run(
            packed, x, chosen, router, gate, None, residual, many=many, direct=False, tiles=tiles, seed=1
        )
        assert torch.equal(others[0], act)
        assert torch.equal(others[1], out)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_alone_and_beside_others(shape: str) -> None:
    hidden, width = SHAPES[shape]
    packed = packed_reference(random_experts("nvfp4", 5, hidden, width), 5)
    x, gate, shared, residual = _inputs(11, hidden, torch.bfloat16)
    chosen, router = random_choice(11, 5, 3)
    _, together = run(packed, x, chosen, router, gate, shared, residual, direct=False)
    for token in (0, 4, 10):
        one = slice(token, token + 1)
        _, alone = run(packed, x[one], chosen[one], router[one], gate[one], shared[one], residual[one])
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_row_tiles_of_a_block_and_the_order_of_threads_change_no_bit(shape: str) -> None:
    hidden, width = SHAPES[shape]
    packed = packed_reference(random_experts("nvfp4", 5, hidden, width, shared=True), 5)
    x, gate, _, residual = _inputs(3, hidden, torch.bfloat16)
    chosen, router = random_choice(3, 5, 4)
    wanted = run(packed, x, chosen, router, gate, None, residual, tiles=1)
    for tiles, seed in ((2, 0), (5, 1), (16, 2)):
        others = run(packed, x, chosen, router, gate, None, residual, tiles=tiles, seed=seed)
        assert all(torch.equal(ours, one) for ours, one in zip(others, wanted, strict=True))


@pytest.mark.parametrize("top", [1, 2, 5])
@pytest.mark.parametrize("direct", [False, True])
def test_any_number_of_slots_is_summed(top: int, direct: bool) -> None:
    weights = random_experts("fp8-row", 5, 64, 32)
    packed = packed_reference(weights, 5)
    x, gate, shared, residual = _inputs(2, 64, torch.float16)
    chosen, router = random_choice(2, 5, top)
    for beside in (None, shared):
        _, out = run(packed, x, chosen, router, gate, beside, residual, direct=direct)
        _check(out, outputs(weights, 5, x, chosen, router, gate, beside, residual))


@pytest.mark.parametrize("many", [False, True])
def test_more_tokens_than_an_item_may_choose_one_expert(many: bool) -> None:
    weights = random_experts("nvfp4", 3, 256, 64)
    packed = packed_reference(weights, 3)
    x, *_ = _inputs(70, 256, torch.bfloat16)
    chosen, router = torch.full((70, 1), 1, dtype=torch.int32), torch.ones(70, 1)
    _, out = run(packed, x, chosen, router, many=many, direct=False)
    _check(out, outputs(weights, 3, x, chosen, router))


@pytest.mark.parametrize(("many", "direct"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("hostile", [-1, 4, 2**31 - 1])
def test_an_expert_that_is_none_makes_its_token_nan_and_no_other(
    hostile: int, many: bool, direct: bool
) -> None:
    weights = random_experts("nvfp4", 4, 256, 64, shared=True)
    packed = packed_reference(weights, 4)
    x, gate, _, residual = _inputs(4, 256, torch.bfloat16)
    chosen, router = random_choice(4, 4, 2)
    chosen[2, 1] = hostile
    _, out = run(packed, x, chosen, router, gate, None, residual, many=many, direct=direct, before=0.0)
    assert out[2].isnan().all()
    chosen[2, 1] = 0 if int(chosen[2, 0]) else 1
    wanted = outputs(weights, 4, x, chosen, router, gate, None, residual)
    kept = torch.tensor([0, 1, 3])
    _check(out[kept], wanted[kept])


def test_scales_of_the_experts_differ_by_powers_and_each_keeps_its_own() -> None:
    weights = random_experts("nvfp4", 5, 256, 64)
    scales = [float(weight.global_scale) for weight in weights]  # type: ignore[attr-defined]
    assert len({scales[i] for i in range(0, 15, 3)}) == 5
    packed = packed_reference(weights, 5)
    assert len(packed.gate_up.row_scale.unique()) == 5
