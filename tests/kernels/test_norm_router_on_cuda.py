"""`norm_router` on a Hopper GPU: the bits of the norm, the product and the choice one after the other, replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_cuda_cases import HALVES, make_x, replayed
from vtensors.errors import RequestError
from vtensors_kernels.plain.matrix import PlainMatrix
from vtensors_kernels.plain.probe import random_matrix
from vtensors_kernels.plain.small import SmallLinear
from vtensors_kernels.steps.norm_router import MAX_TOKENS, NormRouter, probe_norm_router, serves_on
from vtensors_kernels.steps.rms_norm import RMSNormKernel
from vtensors_kernels.steps.router import RouterTopk

pytestmark = pytest.mark.gpu
EPS = 1e-6


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("norm_router is made for sm_90a")


def step_by_step(
    matrix: PlainMatrix, experts: int, top: int, h: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = RMSNormKernel(gain, EPS, h.dtype)(h)
    logits = SmallLinear(matrix, h.dtype)(x)
    chosen, weights = RouterTopk(top, h.dtype)(logits[:, :experts])
    return x, chosen, weights, logits[:, experts:]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("experts", "others", "k", "top"),
    [
        (256, 1, 2048, 8),
        (128, 0, 2048, 8),
        (64, 3, 1032, 32),
        (7, 1, 64, 2),
        (1, 0, 8, 1),
        (250, 70, 2040, 5),
    ],
)
def test_it_gives_the_bits_of_its_steps(
    experts: int, others: int, k: int, top: int, dtype: torch.dtype
) -> None:
    matrix = random_matrix(experts + others, k, dtype, "cuda")
    gain = torch.linspace(-0.5, 1.5, k, device="cuda")
    h = make_x(MAX_TOKENS, k + 8, dtype)[:, 8:] * 3
    wanted = step_by_step(matrix, experts, top, h, gain)
    router = NormRouter(matrix, experts, top)
    for first, last in ((0, 64), (0, 1), (5, 7), (1, 9), (2, 11), (32, 64), (33, 64)):
        for ours, theirs in zip(router(h[first:last], gain, EPS), wanted, strict=True):
            assert torch.equal(ours, theirs[first:last])


def test_its_self_test_passes() -> None:
    probe_norm_router((257, 2048), 256, 8, torch.bfloat16, torch.device("cuda", 0))


def test_a_token_depends_on_nothing_but_itself() -> None:
    matrix, gain = random_matrix(257, 2048, torch.bfloat16, "cuda"), torch.ones(2048, device="cuda")
    router, h = NormRouter(matrix, 256, 8), make_x(20, 2048, torch.bfloat16)
    wanted = router(h, gain, EPS)
    h[3] = float("nan")
    for ours, theirs in zip(router(h, gain, EPS), wanted, strict=True):
        assert torch.equal(ours[4:], theirs[4:])
        assert torch.equal(ours[:3], theirs[:3])


def test_a_graph_replays_it() -> None:
    matrix, gain = random_matrix(257, 2048, torch.bfloat16, "cuda"), torch.ones(2048, device="cuda")
    router, h = NormRouter(matrix, 256, 8), make_x(9, 2048, torch.bfloat16)
    first, last = replayed(lambda: router(h, gain, EPS)[2])
    assert torch.equal(first, last)
    assert torch.equal(first, router(h, gain, EPS)[2])


def test_what_does_not_fit_is_refused() -> None:
    matrix, gain = random_matrix(257, 2048, torch.bfloat16, "cuda"), torch.ones(2048, device="cuda")
    router, h = NormRouter(matrix, 256, 8, most_tokens=32), make_x(33, 2048, torch.bfloat16)
    assert not router.serves(h)
    with pytest.raises(RequestError, match="at most 32"):
        router(h, gain, EPS)
    with pytest.raises(RequestError, match="gain"):
        router(h[:1], gain[1:], EPS)
    assert router(h[:0], gain, EPS)[1].shape == (0, 8)
    wide = random_matrix(257, 2056, torch.bfloat16, "cuda")
    for other, experts, top in ((wide, 256, 8), (matrix, 257, 8), (matrix, 256, 33)):
        assert not serves_on((9, 0), other.shape, experts, top)
        with pytest.raises(RequestError, match="the router kernel cannot choose"):
            NormRouter(other, experts, top)
    with pytest.raises(RequestError, match="with a bias"):
        NormRouter(random_matrix(257, 2048, torch.bfloat16, "cuda", bias=True), 256, 8)
