"""Norms in front of warpgroup products on a Hopper device: one launch lays out the bits of two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vtensors_formats import FP8Weight
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.nvfp4 import wgmma_launches
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.staging import Norm, Staging, probe_staging
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear, random_weight
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments
from vtensors_kernels.steps.rms_norm import norm_rows

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]
CUDA = torch.device("cuda", 0)
EPS = 1e-6


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")


def _x(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(CUDA, dtype)


def _gain(k: int) -> Tensor:
    return torch.linspace(-0.5, 1.5, k, device=CUDA)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [16, 144, 2048, 2064, 5120, 6144, 8192, 8208, 16384])
def test_one_launch_lays_out_the_bits_of_two(columns: int, dtype: torch.dtype) -> None:
    probe_staging(columns, dtype, CUDA)


@pytest.mark.parametrize("tokens", [24, 32, 48, 64])
@pytest.mark.parametrize("columns", [5120, 17408])
def test_rows_are_laid_out_the_same_beside_others_and_with_gaps(columns: int, tokens: int) -> None:
    made, stream = (
        Staging.of(columns, tokens, None, torch.bfloat16, 0),
        torch.cuda.current_stream().cuda_stream,
    )
    whole = _x(tokens, columns + 64, torch.bfloat16)
    buffers = [torch.full((made.nbytes,), 255, dtype=torch.uint8, device=CUDA) for _ in range(2)]
    made.call(stream, whole[:, :columns], None, buffers[0].data_ptr())
    made.call(stream, whole[: tokens - 5, :columns].contiguous(), None, buffers[1].data_ptr())
    all_rows, fewer = (buffer.view(torch.int16).view(-1, 16, tokens, 8) for buffer in buffers)
    assert torch.equal(all_rows[:, :, : tokens - 5], fewer[:, :, : tokens - 5])
    assert (fewer[:, :, tokens - 5 :] == -1).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [17, 24, 32])
def test_segments_behind_a_norm_are_segments_of_normed_rows(m: int, dtype: torch.dtype) -> None:
    x, gain = _x(m, 1040, dtype), _gain(1040)
    linear = WgmmaSegments(pack([random_weight(520, 1040, CUDA, 1)] * 2, paired=True), dtype, "linear_swiglu")
    wanted = linear(norm_rows(x, gain, EPS))
    linear.workspace.poison()
    assert torch.equal(linear.normed(x, gain, EPS), wanted)
    apart = torch.cat([x, x], dim=1)[:, :1040]
    assert torch.equal(linear.normed(apart, gain, EPS), linear(norm_rows(apart, gain, EPS)))


def test_fp8_rows_that_take_two_launches_are_normed_in_both() -> None:
    codes = torch.randn(200, 2048, device=CUDA).to(torch.float8_e4m3fn)
    linear = WgmmaSegments(
        pack_fp8([FP8Weight(codes=codes, scale=torch.tensor(0.01, device=CUDA))]), torch.bfloat16
    )
    x, gain = _x(61, 2048, torch.bfloat16), _gain(2048)
    wanted = linear(norm_rows(x, gain, EPS))
    linear.workspace.poison()
    assert torch.equal(linear.normed(x, gain, EPS), wanted)


@pytest.mark.parametrize("m", [33, 48, 64])
def test_ranges_behind_a_norm_are_ranges_of_normed_rows(m: int) -> None:
    linear = WgmmaLinear(pack([random_weight(520, 1040, CUDA, 1)]), torch.bfloat16)
    x, gain = _x(m, 1040, torch.bfloat16), _gain(1040)
    wanted = linear(norm_rows(x, gain, EPS))
    linear.workspace.poison()
    assert torch.equal(linear.normed(x, gain, EPS), wanted)


def test_the_norm_has_no_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = WgmmaSegments(pack([random_weight(520, 1040, CUDA, 1)]), torch.bfloat16)
    x, gain = _x(20, 1040, torch.bfloat16), _gain(1040)
    assert all(
        made.staging.norms(x, Norm(gain=gain, eps=EPS)) for made in linear._by_tokens if made is not None
    )
    monkeypatch.setattr(wgmma_launches, "norm_rows", lambda *_: pytest.fail("a launch of its own"))
    linear.normed(x, gain, EPS)
