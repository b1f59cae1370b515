"""MXFP8 and unquantized weights."""

from __future__ import annotations

import pytest
import torch

from vtensors.errors import ClaimError, RequestError
from vtensors_formats import e8m0
from vtensors_formats.mxfp8 import MXFP8Weight, quantize_mxfp8
from vtensors_formats.plain import PlainWeight


def random_weight(n: int = 5, k: int = 96) -> MXFP8Weight:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 140, (n, k // 32), dtype=torch.uint8, generator=generator)
    return MXFP8Weight(codes=codes.view(torch.float8_e4m3fn), scale=scale)


@pytest.mark.parametrize("dtype", e8m0.DTYPES)
def test_a_scale_byte_is_a_power_of_two_over_32_columns(dtype: torch.dtype) -> None:
    scale = torch.tensor([[120, 125, 127, 130, 140]], dtype=torch.uint8).view(dtype)
    codes = torch.full((1, 160), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = MXFP8Weight(codes=codes, scale=scale)
    assert weight.dequantize()[0, ::32].tolist() == [2.0**-7, 0.25, 1.0, 8.0, 8192.0]
    assert weight.dequantize()[0, 31::32].tolist() == [2.0**-7, 0.25, 1.0, 8.0, 8192.0]


def test_rows_of_mxfp8_dequantize_to_the_same_rows() -> None:
    weight = random_weight()
    assert torch.equal(weight.rows(1, 4).dequantize(), weight.dequantize()[1:4])
    assert weight.nbytes == 5 * 96 + 5 * 3


def test_a_scale_of_another_group_size_is_refused() -> None:
    codes = torch.zeros(4, 96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ClaimError, match=r"\[4, 6\]"):
        MXFP8Weight(codes=codes, scale=torch.zeros(4, 6, dtype=torch.uint8))


def test_a_scale_of_e4m3_bytes_is_not_taken_for_exponents() -> None:
    codes = torch.zeros(4, 96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(4, 3, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ClaimError, match=r"scale torch\.float8_e4m3fn"):
        MXFP8Weight(codes=codes, scale=scale)


def test_quantizing_to_mxfp8_follows_its_exponent_rule() -> None:
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    values[2] = 0
    for rule in e8m0.ExponentRule:
        weight = quantize_mxfp8(values, rule)
        weight.check_values({})
        amax = values.view(6, 2, 32).abs().amax(-1)
        assert torch.equal(weight.scale, e8m0.encode(amax, rule))
    # With CEIL nothing saturates, so a value is off by at most 1 / 16 of itself or half the smallest step.
    weight = quantize_mxfp8(values)
    step = e8m0.decode(weight.scale).repeat_interleave(32, dim=1) * 2.0**-10
    assert bool(((weight.dequantize() - values).abs() <= values.abs() / 16 + step).all())
    with pytest.raises(RequestError, match="MXFP8"):
        quantize_mxfp8(torch.ones(2, 40))


@pytest.mark.parametrize(
    ("dtype", "scheme"), [(torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")]
)
def test_an_unquantized_weight_is_the_stored_tensor_itself(dtype: torch.dtype, scheme: str) -> None:
    tensor = torch.randn(3, 4, 5).to(dtype)
    weight = PlainWeight(tensor=tensor)
    assert (weight.scheme, weight.shape, weight.nbytes) == (scheme, (3, 4, 5), 60 * dtype.itemsize)
    assert weight.dequantize(dtype) is tensor
    assert torch.equal(weight.dequantize(), tensor.to(torch.float32))
    assert weight.rows(1, 3).tensor.data_ptr() == tensor[1].data_ptr()
    blocks = list(weight.dequantize_blocks(max_bytes=4 * 20 * 2))
    assert [(start, stop) for start, stop, _ in blocks] == [(0, 2), (2, 3)]


def test_an_integer_tensor_is_no_unquantized_weight() -> None:
    with pytest.raises(ClaimError, match="int32"):
        PlainWeight(tensor=torch.zeros(2, 2, dtype=torch.int32))
