"""`rms_norm` on a CUDA device: any shape, the same bits at any number of rows, alone or fused, replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_cuda_cases import HALVES, make_weight, make_x, poisoned, replayed
from nvfp4_stream_cases import stream_linear
from vtensors.errors import RequestError
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.steps.rms_norm import TOLERANCES, RMSNormKernel, norm_rows, probe_rms_norm

pytestmark = pytest.mark.gpu
EPS = 1e-6


def gain_of(columns: int) -> Tensor:
    return torch.linspace(-0.5, 1.5, columns).cuda()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [8, 64, 264, 2048, 2056, 4096, 5120, 8192, 8200, 16384])
def test_any_shape_is_normed_as_the_reference_does(columns: int, dtype: torch.dtype) -> None:
    gain = gain_of(columns)
    kernel, x = RMSNormKernel(gain, EPS, dtype), make_x(70, columns, dtype)
    wanted = rms_norm(x.float(), gain, EPS, zero_centered=False)
    for rows in (1, 2, 33, 70):
        ours = kernel(x[:rows], out=poisoned(rows, columns, dtype=dtype))
        assert not ours.isnan().any()
        limit = TOLERANCES[dtype] * (wanted[:rows].abs() + 2.0**-14)
        assert ((ours.float() - wanted[:rows]).abs() <= limit).all(), f"{rows} rows"
    probe_rms_norm(columns, EPS, dtype, x.device)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("columns", [2048, 5120])
def test_a_row_is_the_same_bits_at_any_number_of_rows_and_place(columns: int) -> None:
    kernel, x = RMSNormKernel(gain_of(columns), EPS, torch.bfloat16), make_x(1000, columns, torch.bfloat16)
    whole = kernel(x)
    for rows in (1, 2, 5, 16, 32, 33, 64, 999):
        assert torch.equal(kernel(x[:rows]), whole[:rows])
        assert torch.equal(kernel(x[-rows:]), whole[-rows:])
    assert torch.equal(kernel(x.reshape(10, 100, columns)).reshape(1000, columns), whole)
    assert torch.equal(norm_rows(x, gain_of(columns), EPS), whole)
    wide = torch.full((1000, columns + 64), float("nan"), dtype=x.dtype, device="cuda")
    for first in (16, 8, 1):  # the last is copied
        wide[:, first : first + columns] = x
        assert torch.equal(kernel(wide[:, first : first + columns]), whole)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [272, 2048, 5120])
def test_the_bits_are_those_of_the_norm_fused_into_a_linear(columns: int, dtype: torch.dtype) -> None:
    weight, x, gain = make_weight(600, columns), make_x(32, columns, dtype), gain_of(columns)
    fused, plain = stream_linear(weight, dtype, norm=True), stream_linear(weight, dtype)
    normed = RMSNormKernel(gain, EPS, dtype)(x)
    for rows in (1, 3, 8, 9, 17, 32):
        assert torch.equal(fused(x[:rows], None, gain, EPS), plain(normed[:rows])), f"{rows} rows"


def test_a_graph_replays_it_over_what_the_step_before_wrote() -> None:
    kernel, x = RMSNormKernel(gain_of(5120), EPS, torch.bfloat16), make_x(4, 5120, torch.bfloat16)
    first, last = replayed(lambda: kernel(kernel(kernel(x))))
    assert torch.equal(first, kernel(kernel(kernel(x))))
    assert torch.equal(first, last)


def test_what_does_not_fit_is_refused() -> None:
    kernel = RMSNormKernel(gain_of(64), EPS, torch.bfloat16)
    for x in (
        make_x(2, 72, torch.bfloat16),
        make_x(2, 64, torch.float16),
        make_x(2, 64, torch.bfloat16).cpu(),
    ):
        with pytest.raises(RequestError, match="does not fit"):
            kernel(x)
    assert kernel(make_x(2, 64, torch.bfloat16)[:0]).shape == (0, 64)
