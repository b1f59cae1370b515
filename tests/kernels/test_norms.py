"""Norms: where the 1 is added, in what precision, and what comes first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vtensors_kernels.reference.gated_rms_norm import gated_rms_norm
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

EPS = 1e-6


@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm_follows_its_formula(zero_centered: bool) -> None:
    x, weight = torch.randn(3, 2, 16), torch.randn(16)
    rms = (x.double() ** 2).mean(-1, keepdim=True).add(EPS).sqrt()
    expected = x.double() / rms * (weight.double() + (1 if zero_centered else 0))
    ours = rms_norm(x, weight, EPS, zero_centered=zero_centered)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_b20_a_small_zero_centered_gain_survives_bfloat16() -> None:
    weight = torch.tensor([0.003]).to(torch.bfloat16).to(torch.float32).expand(8)
    ours = rms_norm(torch.ones(1, 8), weight, 0.0, zero_centered=True)
    torch.testing.assert_close(ours, torch.full((1, 8), 1.003), rtol=0, atol=1e-5)
    # In bfloat16 the 0.003 is lost against 1: the gain must not have passed through it.
    x = torch.full((1, 8), 1.0).to(torch.bfloat16) * 3
    wide = rms_norm(x.float(), weight, 0.0, zero_centered=True)
    assert torch.equal(rms_norm(x, weight, 0.0, zero_centered=True), wide.to(torch.bfloat16))


def test_b19_a_zero_weight_is_gain_one_when_zero_centered_and_gain_zero_when_plain() -> None:
    x = torch.randn(2, 8)
    gain_one = rms_norm(x, torch.ones(8), EPS, zero_centered=False)
    assert torch.equal(rms_norm(x, torch.zeros(8), EPS, zero_centered=True), gain_one)
    assert torch.equal(rms_norm(x, torch.zeros(8), EPS, zero_centered=False), torch.zeros(2, 8))


def test_the_gated_norm_is_plain_and_norms_before_it_gates() -> None:
    x, gate, weight = torch.randn(3, 4, 8), torch.randn(3, 4, 8), torch.randn(8)
    normed = rms_norm(x, weight, EPS, zero_centered=False)
    expected = normed * F.silu(gate)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, EPS), expected, rtol=1e-5, atol=1e-6)
    other_order = rms_norm(x * F.silu(gate), weight, EPS, zero_centered=False)
    assert not torch.allclose(expected, other_order, atol=1e-2)


def test_results_have_the_models_dtype() -> None:
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    weight = torch.ones(8)
    assert rms_norm(x, weight, EPS, zero_centered=False).dtype == torch.bfloat16
    assert gated_rms_norm(x.float(), x, weight, EPS).dtype == torch.bfloat16
    assert swiglu(x, x).dtype == torch.bfloat16


def test_swiglu_gates_its_first_argument() -> None:
    gate, up = torch.randn(2, 8), torch.randn(2, 8)
    torch.testing.assert_close(swiglu(gate, up), gate * torch.sigmoid(gate) * up)
