"""The reference linear and embedding: every scheme, in row blocks, with bias, pre-scale and activations."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vtensors_formats import FP4Activation, FP8StaticActivation, PlainWeight, Weight
from vtensors_formats.fp8_quantize import quantize_fp8_block, quantize_fp8_row, quantize_fp8_tensor
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.reference.linear import linear

N, K = 40, 64


def _matrix(seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def _input(rows: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(9)).to(dtype)


def _weights() -> dict[str, Weight]:
    matrix = _matrix()
    return {
        "nvfp4": quantize_nvfp4(matrix),
        "fp8-tensor": quantize_fp8_tensor(matrix),
        "fp8-row": quantize_fp8_row(matrix),
        "fp8-block": quantize_fp8_block(matrix, (16, 32)),
        "bf16": PlainWeight(tensor=matrix.to(torch.bfloat16)),
        "f32": PlainWeight(tensor=matrix),
    }


SCHEMES = tuple(_weights())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows_at_a_time", [1, 7, N])
def test_the_product_is_that_of_the_dequantized_matrix(scheme: str, rows_at_a_time: int) -> None:
    weight, x = _weights()[scheme], _input()
    expected = x.double() @ weight.dequantize(torch.float32).double().t()
    ours = linear(x, weight, max_bytes=rows_at_a_time * 4 * K)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in ("bf16", "f32")])
def test_bfloat16_input_is_multiplied_in_float32_and_rounded_once(scheme: str) -> None:
    weight, x = _weights()[scheme], _input(dtype=torch.bfloat16)
    expected = (x.float() @ weight.dequantize(torch.float32).t()).to(torch.bfloat16)
    ours = linear(x, weight)
    assert ours.dtype == torch.bfloat16
    assert (ours != expected).float().mean() < 0.02  # sums in another order may round the other way
    torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-7, atol=1e-6)


def test_a_plain_weight_of_the_same_dtype_is_multiplied_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = PlainWeight(tensor=_matrix().to(torch.bfloat16))

    def copied(*_: object) -> Tensor:
        raise AssertionError("the weight was converted")

    monkeypatch.setattr(PlainWeight, "dequantize_float32", copied)
    x = _input(dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight), F.linear(x, weight.tensor))


@pytest.mark.parametrize("scheme", ["nvfp4", "bf16", "f32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_is_added(scheme: str, dtype: torch.dtype) -> None:
    bias = torch.arange(N, dtype=torch.float32).to(torch.bfloat16)
    weight = attrs.evolve(_weights()[scheme], bias=bias)
    x = torch.zeros(2, K, dtype=dtype)
    assert torch.equal(linear(x, weight), bias.to(dtype).expand(2, N))


def test_the_pre_scale_multiplies_the_input_before_it_is_quantized() -> None:
    pre_scale = torch.linspace(0.5, 2.0, K)
    activation = FP8StaticActivation(scale=torch.tensor(0.01))
    weight = attrs.evolve(_weights()["nvfp4"], pre_scale=pre_scale)
    x = _input()
    plain = weight.dequantize(torch.float32).t()
    torch.testing.assert_close(linear(x, weight), (x * pre_scale) @ plain, rtol=0, atol=1e-5)
    expected = activation(x * pre_scale) @ plain
    torch.testing.assert_close(linear(x, weight, activation), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, (activation(x) * pre_scale) @ plain, atol=1e-3)


def test_a_declared_activation_is_applied_only_when_told() -> None:
    activation = FP4Activation(global_scale=torch.tensor(0.002))
    weight = attrs.evolve(_weights()["nvfp4"], activation=activation)
    x = _input()
    plain = weight.dequantize(torch.float32).t()
    torch.testing.assert_close(linear(x, weight), x @ plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(linear(x, weight, activation), activation(x) @ plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_rows_are_those_of_the_dequantized_matrix(scheme: str, dtype: torch.dtype) -> None:
    weight = _weights()[scheme]
    ids = torch.tensor([5, N - 1, 0, 5])
    assert torch.equal(embedding(ids, weight, dtype), weight.dequantize(torch.float32)[ids].to(dtype))


@pytest.mark.parametrize("scheme", ["nvfp4", "bf16"])
@pytest.mark.parametrize("token", [-1, N])
def test_an_id_outside_the_embeddings_is_an_error(scheme: str, token: int) -> None:
    with pytest.raises(IndexError):
        embedding(torch.tensor([0, token]), _weights()[scheme], torch.float32)
