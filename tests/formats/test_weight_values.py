"""Bad values are refused at load: the message names the tensor, the first index and the value."""

from __future__ import annotations

import math

import pytest
import torch

from vtensors.errors import WeightValueError
from vtensors_formats.activations import FP4Activation, FP8StaticActivation
from vtensors_formats.fp8 import FP8Weight
from vtensors_formats.mxfp8 import MXFP8Weight
from vtensors_formats.nvfp4 import NVFP4Weight
from vtensors_formats.weight import Weight

NAMES = {
    "codes": "layer.weight",
    "block_scale": "layer.weight_scale",
    "global_scale": "layer.weight_scale_2",
    "scale": "layer.weight_scale",
    "input_scale": "layer.input_scale",
    "pre_scale": "layer.pre_quant_scale",
}
BAD_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, 0.0]


def typed(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.float8_e4m3fn)


def nvfp4(number: float = 0.5, per_row: bool = False, divides: bool = False) -> NVFP4Weight:
    value = torch.full((4, 1) if per_row else (), number)
    return NVFP4Weight(
        codes=torch.full((4, 24), 0x21, dtype=torch.uint8),
        block_scale=typed(torch.full((4, 3), 0x38, dtype=torch.uint8)),
        global_scale=None if divides else value,
        global_divisor=value if divides else None,
    )


def fp8(scale: torch.Tensor, block: tuple[int, int] | None = None) -> FP8Weight:
    return FP8Weight(codes=typed(torch.full((4, 6), 0x38, dtype=torch.uint8)), scale=scale, block=block)


def refused(weight: Weight, *parts: str) -> None:
    with pytest.raises(WeightValueError) as caught:
        weight.check_values(NAMES)
    for part in parts:
        assert part in str(caught.value)


def test_good_values_of_every_scheme_pass() -> None:
    nvfp4().check_values(NAMES)
    nvfp4(per_row=True, divides=True).check_values(NAMES)
    fp8(torch.tensor(0.5)).check_values(NAMES)
    fp8(torch.full((4, 1), 0.5)).check_values(NAMES)
    fp8(torch.full((2, 2), 0.5), (3, 4)).check_values(NAMES)


@pytest.mark.parametrize("number", BAD_NUMBERS)
@pytest.mark.parametrize("divides", [False, True])
def test_a_global_scale_must_be_finite_and_positive(number: float, divides: bool) -> None:
    refused(nvfp4(number, divides=divides), "layer.weight_scale_2", "global scale", repr(number))


@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_one_bad_row_of_a_global_scale_is_named(number: float) -> None:
    weight = nvfp4(per_row=True)
    assert weight.global_scale is not None
    weight.global_scale[2, 0] = number
    refused(weight, "layer.weight_scale_2", repr(number), "[2, 0]")


@pytest.mark.parametrize(
    ("byte", "problem"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0xB8, "negative")]
)
def test_a_nan_or_negative_block_scale_is_refused(byte: int, problem: str) -> None:
    weight = nvfp4()
    weight.block_scale.view(torch.uint8)[3, 1] = byte
    refused(weight, "layer.weight_scale", problem, "[3, 1]")


def test_every_positive_finite_block_scale_byte_passes() -> None:
    weight = NVFP4Weight(
        codes=torch.full((126, 8), 0x21, dtype=torch.uint8),
        block_scale=typed(torch.arange(1, 0x7F, dtype=torch.uint8).unsqueeze(1)),
        global_scale=torch.tensor(1.0),
    )
    weight.check_values(NAMES)


@pytest.mark.parametrize("zero", [0x00, 0x80])
def test_a_zero_block_scale_is_legal_over_zero_codes_only(zero: int) -> None:
    weight = nvfp4()
    weight.block_scale.view(torch.uint8)[1, 2] = zero
    refused(weight, "layer.weight_scale", "zero over codes that are not", "[1, 2]")
    weight.codes[1, 16:24] = torch.tensor([0x00, 0x08, 0x80, 0x88] * 2, dtype=torch.uint8)
    weight.check_values(NAMES)
    weight.codes[1, 23] = 0x10
    refused(weight, "[1, 2]")


@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_a_matrix_scale_must_be_finite_and_positive(number: float) -> None:
    refused(fp8(torch.tensor(number)), "layer.weight_scale", repr(number))


def test_a_zero_matrix_scale_is_refused_even_over_zero_codes() -> None:
    weight = FP8Weight(codes=typed(torch.zeros(4, 6, dtype=torch.uint8)), scale=torch.tensor(0.0))
    refused(weight, "layer.weight_scale", "zero")


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_row_or_block_scale_is_named(number: float, dtype: torch.dtype) -> None:
    rows = torch.full((4, 1), 0.5, dtype=dtype)
    rows[3, 0] = number
    refused(fp8(rows), "layer.weight_scale", repr(number), "[3, 0]")
    grid = torch.full((2, 2), 0.5, dtype=dtype)
    grid[1, 0] = number
    refused(fp8(grid, (3, 4)), "layer.weight_scale", repr(number), "[1, 0]")


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_row_or_block_scale_is_legal_over_zero_codes_only(zero: float) -> None:
    rows = torch.full((4, 1), 0.5)
    rows[2, 0] = zero
    weight = fp8(rows)
    refused(weight, "layer.weight_scale", "zero over codes that are not", "[2, 0]")
    weight.codes.view(torch.uint8)[2] = torch.tensor([0x00, 0x80] * 3, dtype=torch.uint8)
    weight.check_values(NAMES)

    # Blocks of 3 x 4 over 4 x 6: the last one is row 3, columns 4 and 5.
    grid = torch.full((2, 2), 0.5)
    grid[1, 1] = zero
    weight = fp8(grid, (3, 4))
    refused(weight, "zero over codes that are not", "[1, 1]")
    weight.codes.view(torch.uint8)[3, 4:] = 0
    weight.check_values(NAMES)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_code_is_refused_naming_the_codes(byte: int) -> None:
    weight = fp8(torch.tensor(0.5))
    weight.codes.view(torch.uint8)[1, 4] = byte
    refused(weight, "layer.weight:", "NaN", "[1, 4]")
    mx = MXFP8Weight(
        codes=typed(torch.full((2, 32), byte, dtype=torch.uint8)),
        scale=torch.full((2, 1), 127, dtype=torch.uint8),
    )
    refused(mx, "layer.weight:", "NaN", "[0, 0]")


def test_an_all_zero_tensor_exported_as_nan_codes_is_refused_naming_the_codes() -> None:
    weight = FP8Weight(codes=typed(torch.full((4, 6), 0x7F, dtype=torch.uint8)), scale=torch.tensor(0.0))
    refused(weight, "layer.weight:", "NaN", "[0, 0]")


def test_an_e8m0_nan_scale_is_refused() -> None:
    scale = torch.full((2, 2), 127, dtype=torch.uint8)
    weight = MXFP8Weight(codes=typed(torch.zeros(2, 64, dtype=torch.uint8)), scale=scale)
    weight.check_values(NAMES)
    scale[1, 0] = 0xFF
    refused(weight, "layer.weight_scale", "0xFF", "[1, 0]")
    refused(
        FP8Weight(codes=typed(torch.full((2, 4), 0x38, dtype=torch.uint8)), scale=scale, block=(1, 2)),
        "layer.weight_scale",
        "[1, 0]",
    )


@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_an_input_scale_must_be_finite_and_positive(number: float) -> None:
    codes = typed(torch.full((4, 6), 0x38, dtype=torch.uint8))
    for activation in (
        FP8StaticActivation(scale=torch.tensor(number)),
        FP4Activation(global_scale=torch.tensor(number)),
        FP4Activation(global_divisor=torch.tensor(number)),
    ):
        weight = FP8Weight(codes=codes, scale=torch.tensor(0.5), activation=activation)
        refused(weight, "layer.input_scale", repr(number))


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, -1.0])
def test_an_activation_pre_scale_must_be_finite_and_above_zero(value: float) -> None:
    pre_scale = torch.ones(6, dtype=torch.bfloat16)
    weight = FP8Weight(
        codes=typed(torch.full((4, 6), 0x38, dtype=torch.uint8)), scale=torch.tensor(0.5), pre_scale=pre_scale
    )
    weight.check_values(NAMES)
    pre_scale[5] = value
    refused(weight, "layer.pre_quant_scale", repr(value), "[5]")


def test_a_role_without_a_name_is_named_by_its_role() -> None:
    with pytest.raises(WeightValueError, match="global_scale"):
        nvfp4(0.0).check_values({})


@pytest.mark.parametrize(("number", "divides"), [(2.0**117, False), (2.0**-117, True)])
def test_a_global_scale_that_makes_weights_infinite_is_refused_with_its_value(
    number: float, divides: bool
) -> None:
    refused(nvfp4(number, divides=divides), "layer.weight_scale_2", repr(number), "infinite in float32")
    nvfp4(number * (8 if divides else 1 / 8), divides=divides).check_values(NAMES)


@pytest.mark.parametrize(
    ("scale", "block"),
    [
        (torch.tensor(8e35), None),
        (torch.tensor([[1.0], [1.0], [8e35], [1.0]]), None),
        (torch.tensor([[1.0, 1.0], [1.0, 8e35]]), (2, 3)),
    ],
)
def test_an_fp8_scale_that_makes_weights_infinite_is_refused(
    scale: torch.Tensor, block: tuple[int, int] | None
) -> None:
    refused(fp8(scale, block), "layer.weight_scale", "infinite in float32")
    fp8(scale.clamp(max=7e35), block).check_values(NAMES)


def test_an_e8m0_scale_that_makes_weights_infinite_is_refused() -> None:
    codes = typed(torch.full((2, 64), 0x7E, dtype=torch.uint8))
    scale = torch.full((2, 2), 0xF6, dtype=torch.uint8)
    weight = MXFP8Weight(codes=codes, scale=scale)
    weight.check_values(NAMES)
    assert bool(torch.isfinite(weight.dequantize()).all())
    scale[1, 0] = 0xF7
    refused(weight, "layer.weight_scale", "[1, 0]", "byte 0xF7, 2^120", "infinite in float32")
    assert bool(torch.isinf(weight.dequantize()).any())
