"""The two kernels of a batch of experts on the emulator: the bits of the others, crowds, forms, orders of threads."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from emulation.emulator import needs_compiler
from experts_cases import SCHEMES, outputs, packed_reference, random_choice, random_experts
from experts_emulated import run, run_batch
from vtensors_kernels.experts.batch_form import gate_up_form, outputs_form
from vtensors_kernels.experts.packed import PackedExperts
from vtensors_kernels.probing import TOLERANCES

pytestmark = needs_compiler

# Features of x and of an expert: a step with a tail, a few whole ones, many in segments of one length and of several.
SHAPES = {"short": (48, 16), "tail": (272, 48), "whole": (512, 256), "even": (2048, 128), "long": (1184, 656)}


@attrs.frozen
class Case:
    """Experts, packed, and what a call is given; the shared expert inside or beside."""

    packed: PackedExperts
    wanted: Tensor
    given: tuple[Tensor | None, ...]

    @classmethod
    def make(
        cls,
        scheme: str,
        shape: tuple[int, int],
        m: int,
        *,
        experts: int = 5,
        top: int = 3,
        dtype: torch.dtype = torch.bfloat16,
        inside: bool = True,
        chosen: Tensor | None = None,
    ) -> Case:
        """Random; chosen: experts, or at random."""
        hidden, width = shape
        weights = random_experts(scheme, experts, hidden, width, shared=inside)
        source = torch.Generator().manual_seed(m + hidden)
        x, wide, beside, residual = (
            torch.randn(m, columns, generator=source).to(dtype) for columns in (hidden, 3, hidden, hidden)
        )
        random, router = random_choice(m, experts, top)
        given = (
            *(x, random if chosen is None else chosen, router, wide[:, 1:2]),
            *(None if inside else beside, residual),
        )
        return cls(packed_reference(weights, experts), outputs(weights, experts, *given), given)

    def check(self, ours: Tensor) -> None:
        error = (ours.float() - self.wanted).norm(dim=-1) / self.wanted.norm(dim=-1)
        assert float(error.max()) < TOLERANCES[ours.dtype]


def same(ours: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batch_has_the_bits_of_the_other_launches(scheme: str, dtype: torch.dtype) -> None:
    case = Case.make(scheme, (512, 256) if scheme == "fp8-block" else (1184, 160), 13, dtype=dtype)
    ours = run_batch(case.packed, *case.given)
    case.check(ours[1])
    assert same(ours, run(case.packed, *case.given, direct=False))


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_is_served_with_the_shared_expert_inside_or_beside(shape: str, inside: bool) -> None:
    case = Case.make("nvfp4", SHAPES[shape], 9, inside=inside)
    ours = run_batch(case.packed, *case.given)
    case.check(ours[1])
    assert same(ours, run(case.packed, *case.given, direct=False))


@pytest.mark.parametrize("m", [1, 8, 17, 32])
def test_all_tokens_may_choose_the_same_experts(m: int) -> None:
    chosen = torch.tensor([[4, 0, 3]], dtype=torch.int32).repeat(m, 1)
    case = Case.make("nvfp4", (272, 48), m, chosen=chosen)
    ours = run_batch(case.packed, *case.given)
    case.check(ours[1])
    assert same(ours, run(case.packed, *case.given, direct=False))


@pytest.mark.parametrize("target", ["sm_90a", "sm_86"])
@pytest.mark.parametrize(("m", "top"), [(32, 8), (16, 16), (6, 40), (1, 256)])
def test_as_many_pairs_as_a_batch_may_have_are_found_by_blocks_of_any_size(
    m: int, top: int, target: str
) -> None:
    case = Case.make("fp8-row", (64, 32), m, experts=max(40, top), top=top)
    ours = run_batch(case.packed, *case.given, target=target)
    case.check(ours[1])
    assert same(ours, run(case.packed, *case.given, direct=False))
    size = case.packed.format.block_bytes
    forms = (
        attrs.evolve(gate_up_form(64, size, target), warps=4),
        attrs.evolve(outputs_form(32, size, target), warps=4),
    )
    assert same(run_batch(case.packed, *case.given, forms=forms, target=target), ours)


@pytest.mark.parametrize("experts", [1, 60, 255, 1024])
def test_any_number_of_experts_is_looked_through(experts: int) -> None:
    case = Case.make("nvfp4", (48, 16), 32, experts=experts, top=min(8, experts))
    ours = run_batch(case.packed, *case.given)
    case.check(ours[1])
    assert same(ours, run(case.packed, *case.given, direct=False))


def test_a_shared_expert_without_a_gate_has_the_weight_1() -> None:
    case = Case.make("nvfp4", (272, 48), 9)
    x, chosen, router, _, shared, residual = case.given
    given = (x, chosen, router, None, shared, residual)
    assert same(run_batch(case.packed, *given), run(case.packed, *given, direct=False))


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor"])
def test_forms_devices_and_the_order_of_threads_change_no_bit(scheme: str) -> None:
    case = Case.make(scheme, (2048, 512), 6)
    wanted, size = run_batch(case.packed, *case.given), case.packed.format.block_bytes
    case.check(wanted[1])
    for seed, target in enumerate(("sm_80", "sm_86", "sm_100a"), start=1):
        assert same(run_batch(case.packed, *case.given, target=target, multiprocessors=3, seed=seed), wanted)
    up, out = gate_up_form(2048, size, "sm_90a"), outputs_form(512, size, "sm_90a")
    for seed, (split, blocks, held, stages) in enumerate(
        ((1, 1, False, 2), (8, 2, True, 8), (2, 4, False, 1))
    ):
        forms = (
            attrs.evolve(up, split=split, stage_blocks=blocks, held=held, stages=stages),
            attrs.evolve(out, warps=4, stage_blocks=blocks, held=not held, stages=stages),
        )
        assert same(run_batch(case.packed, *case.given, forms=forms, seed=seed), wanted)


def test_few_blocks_take_their_row_tiles_one_after_the_other() -> None:
    case = Case.make("nvfp4", (512, 64), 7)
    wanted = run_batch(case.packed, *case.given)
    assert same(run_batch(case.packed, *case.given, multiprocessors=1, seed=3), wanted)


@pytest.mark.parametrize("hostile", [-1, 5, 2**31 - 1])
def test_an_expert_that_is_none_makes_its_token_nan_and_no_other(hostile: int) -> None:
    case = Case.make("nvfp4", (256, 64), 9)
    wanted = run_batch(case.packed, *case.given)[1]
    chosen = case.given[1]
    assert chosen is not None
    chosen[4, 1] = hostile
    out = run_batch(case.packed, *case.given, before=0.0, filled=0)[1]
    assert out[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(out[others], wanted[others])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_expert_chosen_twice_makes_its_token_nan_and_no_other(seed: int) -> None:
    case = Case.make("nvfp4", (256, 64), 9)
    wanted = run_batch(case.packed, *case.given)[1]
    chosen = case.given[1]
    assert chosen is not None
    chosen[4, 2] = chosen[4, 0]
    out = run_batch(case.packed, *case.given, before=0.0, filled=0, seed=seed)[1]
    assert out[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(out[others], wanted[others])
