"""The choice of experts."""

from __future__ import annotations

import pytest
import torch

from vtensors_kernels.reference.router_topk import router_topk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_expert(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 256, dtype=dtype)
    logits[1, 200] = logits[1, 7] = logits[1, 90] = 2.0
    logits[2, 255] = 1.0
    experts, weights = router_topk(logits, 2)
    assert experts.tolist() == [[0, 1], [7, 90], [255, 0]]
    torch.testing.assert_close(weights[:2], torch.full((2, 2), 0.5))


def test_logits_that_round_to_one_bfloat16_value_tie() -> None:
    logits = torch.tensor([[1.0, 1.001, 0.0]])
    assert router_topk(logits, 1)[0].tolist() == [[1]]
    assert router_topk(logits.to(torch.bfloat16), 1)[0].tolist() == [[0]]


def test_weights_are_the_softmax_over_all_experts_renormalised() -> None:
    logits = torch.randn(5, 16)
    experts, weights = router_topk(logits, 4)
    assert weights.dtype == torch.float32
    kept = logits.softmax(-1).gather(1, experts)
    torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True))
    assert torch.equal(experts, logits.topk(4).indices)
