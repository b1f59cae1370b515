"""The references of fused ops: the same bits as their decompositions, each part with its own scales."""

from __future__ import annotations

import attrs
import pytest
import torch

from vtensors_formats import FP8StaticActivation, NVFP4Weight, PlainWeight, Weight
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.ops import op
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.linear_add import linear_add
from vtensors_kernels.reference.linear_argmax import argmax, linear_argmax
from vtensors_kernels.reference.linear_swiglu import linear_swiglu, norm_linear_swiglu
from vtensors_kernels.reference.linears import linears, norm_linears
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

FUSED = ("linears", "linear_swiglu", "linear_add", "norm_linears", "norm_linear_swiglu", "linear_argmax")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _parts(*rows: int) -> list[NVFP4Weight]:
    """Parts whose global scales are far apart."""
    return [quantize_nvfp4(_random(n, 32, seed=n) * 10.0**i) for i, n in enumerate(rows)]


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_op_says_what_it_decomposes_into(name: str) -> None:
    assert op(name).decomposition
    assert all(not op(step).decomposition or step in FUSED for step in op(name).decomposition)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
def test_parts_lie_side_by_side_each_with_its_own_global_scale(dtype: torch.dtype, rows: int) -> None:
    x, weights = _random(rows, 32).to(dtype), _parts(24, 8, 16)
    out = linears(x, weights)
    assert (out.shape, out.dtype) == ((rows, 48), dtype)
    for part, weight in zip(out.split([24, 8, 16], dim=-1), weights, strict=True):
        assert torch.equal(part, linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_fused_op_has_the_bits_of_its_steps(dtype: torch.dtype) -> None:
    x, residual = _random(3, 32).to(dtype), _random(3, 24, seed=1).to(dtype)
    gain, (gate, up) = 1 + _random(32, seed=2), _parts(24, 24)
    normed = rms_norm(x, gain - 1, 1e-6, zero_centered=True)
    # gain - 1 + 1 is gain up to a rounding; the plain form is exact.
    exact = rms_norm(x, gain, 1e-6, zero_centered=False)
    torch.testing.assert_close(normed, exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    both = swiglu(linear(x, gate), linear(x, up))
    assert torch.equal(linear_swiglu(x, gate, up), both)
    assert not torch.equal(linear_swiglu(x, up, gate), both)
    assert torch.equal(norm_linear_swiglu(x, gain, 1e-6, gate, up), linear_swiglu(exact, gate, up))
    assert torch.equal(norm_linears(x, gain, 1e-6, [gate, up]), linears(exact, [gate, up]))
    assert torch.equal(linear_add(x, residual, gate), residual + linear(x, gate))


def test_the_activation_quantizer_sees_x_behind_the_norm() -> None:
    x, gain, (weight,) = _random(3, 32), 1 + _random(32, seed=2), _parts(8)
    quantizer = FP8StaticActivation(scale=torch.tensor(0.25))
    expected = linear(quantizer(rms_norm(x, gain, 1e-6, zero_centered=False)), weight)
    assert torch.equal(norm_linears(x, gain, 1e-6, [weight], quantizer), expected)


def test_the_largest_logit_is_taken_after_rounding_and_the_lowest_index_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 1.0, 2.0, 2.0]])
    assert argmax(logits).tolist() == [1, 0]
    rows = torch.ones(4, 16)
    # In float32 row 2 wins by less than half a bfloat16 step; rounded, rows 1 and 2 are equal.
    rows[0], rows[2, 0], rows[3] = 0.5, 1.001, 0.25
    weight: Weight = PlainWeight(tensor=rows)
    x = torch.ones(1, 16)
    assert linear_argmax(x, weight).tolist() == [2]
    assert linear_argmax(x.bfloat16(), weight).tolist() == [1]
    assert linear_argmax(x, weight).dtype == torch.int64


def test_biases_and_pre_scales_belong_to_their_part() -> None:
    first, second = _parts(8, 16)
    biased = attrs.evolve(first, bias=_random(8, seed=5), pre_scale=1 + _random(32, seed=6).abs())
    x = _random(2, 32)
    assert torch.equal(linears(x, [biased, second])[:, 8:], linear(x, second))
    assert torch.equal(linears(x, [biased, second])[:, :8], linear(x, biased))
