"""FP8 weights: scales per matrix, row and block, partial edge blocks, views by rows, encoding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors.errors import ClaimError, RequestError
from vtensors_formats import e4m3, e8m0
from vtensors_formats.fp8 import FP8Weight, canonical_scale
from vtensors_formats.fp8_quantize import quantize_fp8_block, quantize_fp8_row, quantize_fp8_tensor


def random_codes(n: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8, generator=generator)
    sign = torch.randint(0, 2, (n, k), dtype=torch.uint8, generator=generator) << 7
    return (magnitude | sign).view(torch.float8_e4m3fn)


def random_scale(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01


def by_definition(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Element by element: codes[n, k] * scale[n // BN, k // BK]."""
    rows = torch.arange(codes.shape[0]) // block[0]
    columns = torch.arange(codes.shape[1]) // block[1]
    return codes.to(torch.float32) * scale.to(torch.float32)[rows[:, None], columns[None, :]]


@pytest.mark.parametrize(
    ("shape", "wanted", "scheme"),
    [
        ((), (), "fp8-tensor"),
        ((1,), (), "fp8-tensor"),
        ((1, 1), (), "fp8-tensor"),
        ((32,), (32, 1), "fp8-row"),
        ((32, 1), (32, 1), "fp8-row"),
    ],
)
def test_the_shape_of_a_scale_decides_what_it_scales(
    shape: tuple[int, ...], wanted: tuple[int, ...], scheme: str
) -> None:
    codes, stored = random_codes(32, 32), random_scale(*shape)
    scale, block = canonical_scale(stored, (32, 32))
    weight = FP8Weight(codes=codes, scale=scale, block=block)
    assert scale.shape == wanted
    assert weight.scheme == scheme
    expected = codes.to(torch.float32) * stored.reshape(-1, 1)
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 3, 1)])
def test_a_grid_of_either_rank_is_a_block_scale(shape: tuple[int, ...]) -> None:
    scale, block = canonical_scale(random_scale(*shape), (130, 300), (128, 128))
    assert scale.shape == (2, 3)
    assert block == (128, 128)


def test_one_number_in_a_file_that_declares_blocks_is_a_matrix_scale() -> None:
    scale, block = canonical_scale(random_scale(), (64, 256), (128, 128))
    assert (tuple(scale.shape), block) == ((), None)


@pytest.mark.parametrize("shape", [(16,), (1, 32), (32, 2), (64,), (2, 2), (1, 1, 1)])
def test_any_other_scale_shape_is_refused_with_what_is_accepted(shape: tuple[int, ...]) -> None:
    with pytest.raises(ClaimError) as caught:
        canonical_scale(random_scale(*shape), (32, 64))
    assert str(list(shape)) in str(caught.value)
    assert "[32, 1]" in str(caught.value)


def test_a_transposed_block_grid_is_refused() -> None:
    with pytest.raises(ClaimError, match=r"\[2, 3\]"):
        canonical_scale(random_scale(3, 2), (256, 384), (128, 128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (130, 300), (5, 7), (256, 129), (300, 128)])
def test_partial_edge_blocks_use_their_own_scale(n: int, k: int, dtype: torch.dtype) -> None:
    codes = random_codes(n, k)
    scale = random_scale(-(-n // 128), -(-k // 128)).to(dtype)
    weight = FP8Weight(codes=codes, scale=scale, block=(128, 128))
    assert weight.scheme == "fp8-block"
    assert torch.equal(weight.dequantize(), by_definition(codes, scale, (128, 128)))


def test_a_bfloat16_scale_is_widened_and_stays_as_stored() -> None:
    codes, scale = random_codes(4, 6), random_scale(4, 1).to(torch.bfloat16)
    weight = FP8Weight(codes=codes, scale=scale)
    assert torch.equal(weight.dequantize(), codes.to(torch.float32) * scale.to(torch.float32))
    assert weight.nbytes == 24 + 8


@pytest.mark.parametrize("dtype", e8m0.DTYPES)
def test_a_block_scale_of_exponent_bytes_is_a_power_of_two(dtype: torch.dtype) -> None:
    stored = torch.tensor([[120, 127]], dtype=torch.uint8).view(dtype)
    codes = random_codes(3, 8)
    weight = FP8Weight(codes=codes, scale=stored, block=(4, 4))
    expected = by_definition(codes, torch.tensor([[2.0**-7, 1.0]]), (4, 4))
    assert torch.equal(weight.dequantize(), expected)


@given(
    bounds=st.tuples(st.integers(0, 23), st.integers(0, 23)),
    inner=st.tuples(st.integers(0, 23), st.integers(0, 23)),
    kind=st.sampled_from(["tensor", "row", "block"]),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_rows_of_rows_dequantize_to_the_same_rows(
    bounds: tuple[int, int], inner: tuple[int, int], kind: str, block: tuple[int, int]
) -> None:
    codes = random_codes(23, 10)
    shapes = {"tensor": (), "row": (23, 1), "block": (-(-23 // block[0]), -(-10 // block[1]))}
    weight = FP8Weight(
        codes=codes, scale=random_scale(*shapes[kind]), block=block if kind == "block" else None
    )
    start, stop = sorted(bounds)
    cut = weight.rows(start, stop)
    assert torch.equal(cut.dequantize(), weight.dequantize()[start:stop])
    first, last = (min(value, stop - start) for value in sorted(inner))
    assert torch.equal(cut.rows(first, last).dequantize(), cut.dequantize()[first:last])
    assert cut.codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()


def test_a_large_weight_in_bfloat16_equals_the_float32_one_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtensors_formats.weight.BLOCK_BYTES", 1000)
    weight = FP8Weight(codes=random_codes(130, 300), scale=random_scale(2, 3), block=(128, 128))
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize().to(torch.bfloat16))


def test_encoders_use_448_for_the_largest_value_of_each_scale() -> None:
    values = torch.randn(130, 70, generator=torch.Generator().manual_seed(0))
    for weight in (
        quantize_fp8_tensor(values),
        quantize_fp8_row(values),
        quantize_fp8_block(values, (64, 32)),
    ):
        weight.check_values({})
        assert float(weight.codes.to(torch.float32).abs().max()) == 448.0
        # Half a step of E4M3 is 1 / 16 of a value, or half the smallest subnormal of the largest scale.
        slack = values.abs() / 16 + weight.scale_float32().max() * 2.0**-10
        assert bool(((weight.dequantize() - values).abs() <= slack).all())
    assert torch.equal(quantize_fp8_row(values).scale, values.abs().amax(1, keepdim=True) / 448)


def test_block_encoding_agrees_with_each_block_encoded_alone() -> None:
    values = torch.randn(10, 7, generator=torch.Generator().manual_seed(2))
    whole = quantize_fp8_block(values, (4, 3))
    for row in range(3):
        for column in range(3):
            part = (slice(row * 4, row * 4 + 4), slice(column * 3, column * 3 + 3))
            alone = quantize_fp8_tensor(values[part])
            assert torch.equal(e4m3.as_bytes(whole.codes)[part], e4m3.as_bytes(alone.codes))
            assert whole.scale[row, column] == alone.scale


def test_zeros_are_encoded_with_legal_scales() -> None:
    for weight in (quantize_fp8_tensor(torch.zeros(4, 4)), quantize_fp8_row(torch.zeros(4, 4))):
        weight.check_values({})
        assert torch.equal(weight.dequantize(), torch.zeros(4, 4))


def test_values_that_are_not_finite_are_not_encoded() -> None:
    with pytest.raises(RequestError, match="FP8"):
        quantize_fp8_tensor(torch.full((2, 2), torch.inf))


def test_moving_a_weight_keeps_every_part() -> None:
    weight = FP8Weight(
        codes=random_codes(4, 6), scale=random_scale(4, 1), bias=torch.ones(4), pre_scale=torch.ones(6)
    )
    moved = weight.to("meta")
    parts = (*moved.stored(), moved.bias, moved.pre_scale)
    assert {part.device.type for part in parts if part is not None} == {"meta"}
    assert weight.device.type == "cpu"
