"""The router kernel in the emulator: exactly the reference's experts, its weights to a few units in the last place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_kernels.reference.router_topk import router_topk
from vtensors_kernels.steps.router import WARPS, RouterTopk, per_lane_of

HALVES = [torch.bfloat16, torch.float16]


def routed(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits [M, E], rows any distance apart -> experts [M, k] int32, weights [M, k]."""
    rows, experts = logits.shape
    chosen = torch.full((rows, k), -1, dtype=torch.int32)
    weights = torch.full((rows, k), float("nan"))
    defines = {"VT_F16": int(logits.dtype == torch.float16), "VT_PER_LANE": per_lane_of(experts)}
    arguments = [logits, chosen, weights, logits.stride(0), rows, experts, k]
    emulate("common/router_topk.cu", "router_topk", defines, (-(-rows // WARPS),), (32 * WARPS,), arguments)
    return chosen, weights


def check(logits: Tensor, k: int) -> None:
    chosen, weights = routed(logits, k)
    wanted, wanted_weights = router_topk(logits, k)
    assert torch.equal(chosen.long(), wanted)
    assert torch.allclose(weights, wanted_weights, rtol=1e-5, atol=1e-7, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("experts", "k"), [(1, 1), (8, 2), (31, 31), (32, 32), (64, 6), (256, 8), (257, 8), (500, 4), (1024, 32)]
)
def test_choice_and_weights_are_the_references(experts: int, k: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(experts)
    check((torch.randn(6, experts, generator=source) * 3).to(dtype), k)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_the_lowest_index_is_first_among_equals(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (8, 256), generator=source).to(dtype)
    logits[1] = 0
    logits[2] = torch.where(logits[2] == 0, -0.0, logits[2])
    logits[3, ::3] = -0.0
    check(logits, 8)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_at_the_ends_of_the_format_are_ranked(dtype: torch.dtype) -> None:
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max
    row = torch.tensor([-huge, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, huge, float("-inf")])
    check(torch.stack([row, row.flip(0), -row]).to(dtype), 5)


@needs_compiler
def test_infinity_and_nan_are_ranked_as_by_the_reference_and_give_nan_weights() -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    logits[0, 7] = float("nan")
    logits[1, 7] = -float("nan")
    logits[2, 9] = float("inf")
    logits[3] = float("-inf")
    check(logits.bfloat16(), 4)


@needs_compiler
def test_a_row_is_the_same_bits_alone_and_as_a_slice_of_a_wider_matrix() -> None:
    source = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 256, generator=source).bfloat16()
    wide = torch.full((5, 257), float("nan"), dtype=torch.bfloat16)
    wide[:, :256] = logits
    chosen, weights = routed(logits, 8)
    again = routed(wide[:, :256], 8)
    assert torch.equal(again[0], chosen)
    assert torch.equal(again[1], weights)
    alone = [routed(row, 8)[1] for row in logits.split(1)]
    assert torch.equal(torch.cat(alone), weights)


def test_what_the_kernel_has_no_form_for_is_refused() -> None:
    for experts in (0, 1025):
        with pytest.raises(RequestError, match=r"1\.\.1024"):
            per_lane_of(experts)
    for k in (0, 33):
        with pytest.raises(RequestError, match=r"1\.\.32"):
            RouterTopk(k, torch.bfloat16)
    with pytest.raises(RequestError, match="CUDA"):
        RouterTopk(8, torch.bfloat16, "cpu")
