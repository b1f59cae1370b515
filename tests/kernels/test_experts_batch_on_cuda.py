"""The two kernels of a batch of experts on a CUDA device: the bits of the launches that they stand in for."""

from __future__ import annotations

import pytest
import torch

from experts_cases import random_experts
from experts_cuda_cases import Inputs, bound, called, check, reference
from vtensors_kernels.experts.form import MOST_PAIRS, ExpertsTuning

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor", "fp8-block", "mxfp8"])
def test_a_batch_has_the_bits_of_the_launches_without_one(scheme: str, inside: bool) -> None:
    for hidden, width in ((2048, 512), (1280, 640)):
        weights = random_experts(scheme, 24, hidden, width, shared=inside, device="cuda")
        batch = bound(weights, 24, torch.bfloat16, ExpertsTuning(batch_pairs=1))
        other = bound(weights, 24, torch.bfloat16, ExpertsTuning(batch_pairs=MOST_PAIRS + 1))
        for m in (1, 2, 7, 8, 9, 16, 31, 32):
            given = Inputs.make(m, hidden, 24, 8, torch.bfloat16, shared=not inside)
            assert torch.equal(called(batch, given), called(other, given)), m


def test_batches_of_any_choices_have_the_same_bits() -> None:
    weights = random_experts("nvfp4", 40, 1168, 144, shared=True, device="cuda")
    batch = bound(weights, 40, torch.bfloat16, ExpertsTuning(batch_pairs=1))
    other = bound(weights, 40, torch.bfloat16, ExpertsTuning(batch_pairs=MOST_PAIRS + 1))
    for m, top in ((1, 1), (32, 1), (5, 3), (32, 7), (12, 20), (6, 40)):
        given = Inputs.make(m, 1168, 40, top, torch.bfloat16)
        out = called(batch, given)
        assert torch.equal(out, called(other, given)), (m, top)
        check(out, reference(weights, 40, given))
        given.chosen[:] = given.chosen[:1].clone()
        assert torch.equal(called(batch, given), called(other, given)), (m, top)
