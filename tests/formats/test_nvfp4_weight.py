"""NVFP4 weights: exact values in the publishers' order, views by rows, encoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors.errors import ClaimError, RequestError
from vtensors_formats import e2m1, e4m3
from vtensors_formats.nvfp4 import NVFP4Weight, quantize_nvfp4


def one_block(
    byte: int,
    scale_byte: int,
    *,
    global_scale: torch.Tensor | None = None,
    global_divisor: torch.Tensor | None = None,
) -> NVFP4Weight:
    """[1, 16], every code byte and the block scale byte as given."""
    scale = torch.tensor([[scale_byte]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.full((1, 8), byte, dtype=torch.uint8)
    return NVFP4Weight(
        codes=codes, block_scale=scale, global_scale=global_scale, global_divisor=global_divisor
    )


def random_weight(n: int, k: int, *, seed: int, per_row: bool, divides: bool) -> NVFP4Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    number = torch.rand((n, 1) if per_row else (), generator=generator) + 0.01
    return NVFP4Weight(
        codes=codes,
        block_scale=scale.view(torch.float8_e4m3fn),
        global_scale=None if divides else number,
        global_divisor=number if divides else None,
        bias=torch.arange(n, dtype=torch.bfloat16),
    )


def test_a_multiplier_and_its_divisor_give_the_same_values() -> None:
    multiplied = one_block(0x21, 0x40, global_scale=torch.tensor(0.25)).dequantize()
    divided = one_block(0x21, 0x40, global_divisor=torch.tensor(4.0)).dequantize()
    assert multiplied[0, :2].tolist() == [0.25, 0.5]
    assert torch.equal(multiplied, divided)


def test_the_low_nibble_is_the_even_column() -> None:
    values = one_block(0x12, 0x40, global_scale=torch.tensor(0.25)).dequantize()
    assert values[0].tolist() == [0.5, 0.25] * 8


@pytest.mark.parametrize("divides", [False, True])
def test_every_code_times_every_block_scale_is_exact_in_the_publishers_order(divides: bool) -> None:
    scale_bytes = torch.arange(1, 0x80, dtype=torch.uint8)[:-1]
    codes = e2m1.pack(torch.arange(16, dtype=torch.uint8)).repeat(len(scale_bytes), 1)
    number = torch.tensor(3584.123 if divides else 0.00041069428)
    weight = NVFP4Weight(
        codes=codes,
        block_scale=scale_bytes.view(torch.float8_e4m3fn).unsqueeze(1),
        global_scale=None if divides else number,
        global_divisor=number if divides else None,
    )
    stored = np.float32(number.item())
    scales = e4m3.decode(scale_bytes).numpy()
    effective = scales / stored if divides else scales * stored
    assert effective.dtype == np.float32
    expected = np.array(e2m1.VALUES, dtype=np.float32)[None, :] * effective[:, None]
    assert np.array_equal(weight.dequantize().numpy(), expected)


def test_the_stored_global_scale_is_kept_because_a_double_reciprocal_is_inexact() -> None:
    stored = torch.tensor(0.00041069428)
    twice = 1 / (1 / stored)
    assert twice != stored, "the number no longer shows the fault"
    kept = one_block(0x22, 0x38, global_scale=stored)
    assert kept.stored()[2] is stored
    assert kept.dequantize()[0, 0] == stored
    converted = one_block(0x22, 0x38, global_divisor=1 / stored).dequantize()[0, 0]
    assert abs(float(converted) - float(stored)) <= 2.0**-35


@given(
    bounds=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    per_row=st.booleans(),
    divides=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_of_the_dequantized_are_the_dequantized_rows(
    bounds: tuple[int, int], per_row: bool, divides: bool, seed: int
) -> None:
    start, stop = sorted(bounds)
    weight = random_weight(9, 48, seed=seed, per_row=per_row, divides=divides)
    cut = weight.rows(start, stop)
    assert cut.shape == (stop - start, 48)
    assert torch.equal(cut.dequantize(), weight.dequantize()[start:stop])
    assert cut.bias is not None
    assert cut.bias.tolist() == list(range(start, stop))


def test_rows_are_a_view_of_the_same_memory() -> None:
    weight = random_weight(9, 48, seed=0, per_row=True, divides=False)
    cut = weight.rows(2, 7)
    for part, whole in zip(cut.stored(), weight.stored(), strict=True):
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 10)])
def test_rows_outside_the_weight_are_refused(start: int, stop: int) -> None:
    with pytest.raises(RequestError, match="rows outside"):
        random_weight(9, 48, seed=0, per_row=False, divides=False).rows(start, stop)


def test_dequantizing_in_blocks_gives_the_whole_in_every_dtype() -> None:
    weight = random_weight(33, 64, seed=1, per_row=True, divides=True)
    pieces = list(weight.dequantize_blocks(max_bytes=64 * 4 * 5, dtype=torch.bfloat16))
    assert [(start, stop) for start, stop, _ in pieces] == [(i, min(i + 5, 33)) for i in range(0, 33, 5)]
    assert torch.equal(torch.cat([piece for _, _, piece in pieces]), weight.dequantize(torch.bfloat16))
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize().to(torch.bfloat16))


def test_nbytes_counts_codes_and_scales() -> None:
    assert random_weight(9, 48, seed=0, per_row=False, divides=False).nbytes == 9 * 24 + 9 * 3 + 4


def test_both_global_scales_or_neither_are_refused() -> None:
    one = torch.tensor(1.0)
    with pytest.raises(ClaimError, match="one global scale"):
        one_block(0, 0x38)
    with pytest.raises(ClaimError, match="one global scale"):
        one_block(0, 0x38, global_scale=one, global_divisor=one)


@pytest.mark.parametrize("shape", [(4, 2), (3, 4), (4, 4)])
def test_a_transposed_or_cut_block_scale_is_refused_with_both_shapes(shape: tuple[int, int]) -> None:
    codes = torch.zeros(4, 24, dtype=torch.uint8)
    scale = torch.full(shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ClaimError) as caught:
        NVFP4Weight(codes=codes, block_scale=scale, global_scale=torch.tensor(1.0))
    assert str(list(shape)) in str(caught.value)
    assert "[4, 3]" in str(caught.value)


def test_a_block_scale_stored_as_plain_bytes_is_refused() -> None:
    scale = torch.full((1, 1), 0x38, dtype=torch.uint8)
    with pytest.raises(ClaimError, match="float8_e4m3fn"):
        NVFP4Weight(
            codes=torch.zeros(1, 8, dtype=torch.uint8), block_scale=scale, global_scale=torch.tensor(1.0)
        )


def test_quantizing_what_was_dequantized_gives_the_same_codes() -> None:
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    first = quantize_nvfp4(values)
    again = quantize_nvfp4(first.dequantize(), first.global_scale)
    assert torch.equal(first.codes & 0x77, again.codes & 0x77)
    assert torch.equal(e4m3.as_bytes(first.block_scale), e4m3.as_bytes(again.block_scale))


def test_quantizing_keeps_every_value_within_half_a_step() -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight = quantize_nvfp4(values)
    assert weight.global_scale is not None
    # The widest gap of E2M1 is 4..6, so half a step is 1; the E4M3 scale may fall short by 1 / 16.
    scale = (e4m3.decode(weight.block_scale) * weight.global_scale).repeat_interleave(16, dim=1)
    assert bool(((weight.dequantize() - values.float()).abs() <= scale * 1.0 + 6 * scale / 16).all())
    weight.check_values({})


def test_a_group_or_matrix_of_zeros_is_quantized_to_legal_scales() -> None:
    values = torch.zeros(2, 32)
    quantize_nvfp4(values).check_values({})
    assert torch.equal(quantize_nvfp4(values).dequantize(), values)
    values[0, :16] = 1.0
    weight = quantize_nvfp4(values)
    assert e4m3.decode(weight.block_scale).tolist() == [[448.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("values", [torch.ones(2, 40), torch.ones(16), torch.full((1, 16), torch.nan)])
def test_what_cannot_be_quantized_to_nvfp4_is_refused(values: torch.Tensor) -> None:
    with pytest.raises(RequestError, match="NVFP4"):
        quantize_nvfp4(values)
