"""`router_topk` on a CUDA device: the reference's experts, the same bits at any number of rows, replayed."""

from __future__ import annotations

import pytest
import torch

from nvfp4_cuda_cases import HALVES, make_x, replayed
from vtensors.errors import RequestError
from vtensors_kernels.reference.router_topk import router_topk
from vtensors_kernels.steps.router import RouterTopk, probe_router

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("experts", "k"), [(1, 1), (31, 5), (64, 6), (128, 8), (256, 8), (257, 32), (1024, 32)]
)
def test_choice_and_weights_are_the_references(experts: int, k: int, dtype: torch.dtype) -> None:
    call, logits = RouterTopk(k, dtype), make_x(200, experts, dtype) * 3
    logits[50:100] = logits[50:100].round()  # equals
    for rows in (1, 3, 4, 64, 65, 200):
        chosen, weights = call(logits[:rows])
        wanted, wanted_weights = router_topk(logits[:rows].cpu(), k)
        assert chosen.dtype == torch.int32
        assert torch.equal(chosen.cpu().long(), wanted)
        assert torch.allclose(weights.cpu(), wanted_weights, rtol=1e-5, atol=1e-7)
    probe_router(experts, k, dtype, logits.device)


def test_nan_and_infinity_are_ranked_as_by_the_reference() -> None:
    logits = make_x(4, 64, torch.bfloat16)
    logits[0, 7], logits[1, 7], logits[2, 9], logits[3] = (
        float("nan"),
        -float("nan"),
        float("inf"),
        float("-inf"),
    )
    chosen, weights = RouterTopk(4, torch.bfloat16)(logits)
    wanted, wanted_weights = router_topk(logits.cpu(), 4)
    assert torch.equal(chosen.cpu().long(), wanted)
    assert torch.allclose(weights.cpu(), wanted_weights, equal_nan=True)


@pytest.mark.fault("B31")
def test_a_row_is_the_same_bits_at_any_number_of_rows_and_as_a_slice() -> None:
    call, wide = RouterTopk(8, torch.bfloat16), make_x(300, 257, torch.bfloat16)
    chosen, weights = call(wide[:, :256].contiguous())
    for rows in (1, 2, 31, 64, 299):
        for found in (call(wide[:rows, :256]), call(wide[:rows, :256].contiguous())):
            assert torch.equal(found[0], chosen[:rows])
            assert torch.equal(found[1], weights[:rows])
    last, first = call(wide[-1:, 1:]), call(wide[:, 1:])
    assert torch.equal(last[1], first[1][-1:])


def test_a_graph_replays_it() -> None:
    call, logits = RouterTopk(8, torch.float16), make_x(32, 256, torch.float16)
    first, last = replayed(lambda: call(logits)[1])
    assert torch.equal(first, last)
    assert torch.equal(first, call(logits)[1])


def test_what_does_not_fit_is_refused() -> None:
    call = RouterTopk(8, torch.bfloat16)
    with pytest.raises(RequestError, match="too few"):
        call(make_x(2, 7, torch.bfloat16))
    with pytest.raises(RequestError, match="do not fit"):
        call(make_x(2, 64, torch.float16))
    with pytest.raises(RequestError, match="1025 experts"):
        call(make_x(2, 1025, torch.bfloat16))
    assert call(make_x(2, 64, torch.bfloat16)[:0])[0].shape == (0, 8)
