"""Encoders in pieces and as a whole, and the two searches of NVFP4 block scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vtensors import RequestError
from vtensors.records import EncodeOptions
from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight, encoders
from vtensors_formats.encoders import FP8Encoder, MXFP8Encoder, NVFP4Encoder
from vtensors_formats.fp8_quantize import quantize_fp8_block, quantize_fp8_row, quantize_fp8_tensor
from vtensors_formats.nvfp4 import quantize_nvfp4

ALL = {
    "nvfp4": encoders.NVFP4,
    "fp8-tensor": encoders.FP8_TENSOR,
    "fp8-row": encoders.FP8_ROW,
    "fp8-block": encoders.FP8_BLOCK,
    "mxfp8": encoders.MXFP8,
}
Encoder = NVFP4Encoder | FP8Encoder | MXFP8Encoder
PLAIN = EncodeOptions()


def _matrix(n: int = 300, k: int = 256) -> torch.Tensor:
    random = torch.Generator().manual_seed(n * k)
    return torch.randn(n, k, generator=random).mul_(torch.rand(n, 1, generator=random)).to(torch.bfloat16)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        EncodeOptions(mse=True),
        EncodeOptions(four_over_six=True),
        EncodeOptions(arithmetic="modelopt"),
        EncodeOptions(arithmetic="compressed-tensors"),
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_rows_in_pieces_give_the_bytes_of_the_whole(name: str, options: EncodeOptions) -> None:
    encoder, weight = ALL[name], _matrix()
    amax = weight.abs().max().float() if encoder.needs_amax else None
    whole = encoder.encode(weight, amax, options)
    step = 128 if encoder.row_step == 128 else 77
    pieces = [encoder.encode(rows, amax, options) for rows in weight.split(step)]
    for role, tensor in whole.items():
        joined = torch.cat([_bytes(p[role]) for p in pieces]) if tensor.ndim else _bytes(pieces[0][role])
        assert torch.equal(joined, _bytes(tensor)), role


@pytest.mark.parametrize("name", ALL)
def test_the_layouts_are_what_encode_gives(name: str) -> None:
    encoder, weight = ALL[name], _matrix(130, 256)
    for options in (PLAIN, EncodeOptions(arithmetic="compressed-tensors")):
        given = encoder.encode(weight, weight.abs().max().float(), options)
        layouts = encoder.layouts((130, 256), options)
        assert {role: tuple(t.shape) for role, t in given.items()} == {r: x.shape for r, x in layouts.items()}
        sizes = {
            "U8": torch.uint8,
            "F8_E4M3": torch.float8_e4m3fn,
            "F32": torch.float32,
            "BF16": torch.bfloat16,
        }
        assert all(given[role].dtype == sizes[layout.dtype] for role, layout in layouts.items())


def test_without_options_the_bytes_are_those_of_the_reference_encoders() -> None:
    weight = _matrix()
    amax = weight.abs().max().float()
    nvfp4 = quantize_nvfp4(weight)
    made = encoders.NVFP4.encode(weight, amax, PLAIN)
    assert torch.equal(made["codes"], nvfp4.codes)
    assert nvfp4.global_scale is not None
    assert torch.equal(made["global_scale"], nvfp4.global_scale)
    for encoder, reference in (
        (encoders.FP8_TENSOR, quantize_fp8_tensor(weight)),
        (encoders.FP8_ROW, quantize_fp8_row(weight)),
        (encoders.FP8_BLOCK, quantize_fp8_block(weight)),
    ):
        made = encoder.encode(weight, amax, PLAIN)
        assert torch.equal(_bytes(made["codes"]), _bytes(reference.codes))
        assert torch.equal(made["scale"], reference.scale)


def _nvfp4_error(weight: torch.Tensor, options: EncodeOptions) -> float:
    roles = encoders.NVFP4.encode(weight, weight.abs().max().float(), options)
    values = NVFP4Weight(**roles)
    values.check_values({})
    return float((values.dequantize() - weight.float()).square().sum())


def test_the_searches_lower_the_squared_error() -> None:
    weight = _matrix(256, 512)
    plain = _nvfp4_error(weight, PLAIN)
    mse = _nvfp4_error(weight, EncodeOptions(mse=True))
    four = _nvfp4_error(weight, EncodeOptions(four_over_six=True))
    both = _nvfp4_error(weight, EncodeOptions(four_over_six=True, mse=True))
    assert mse < 0.95 * plain
    assert four < 0.95 * plain
    assert both < mse


def test_four_over_six_leaves_room_in_the_block_scales() -> None:
    weight = _matrix()
    amax = weight.abs().max().float()
    roles = encoders.NVFP4.encode(weight, amax, EncodeOptions(four_over_six=True))
    assert torch.equal(roles["global_scale"], amax / (6 * 256))
    assert float(roles["block_scale"].float().max()) <= 384


@pytest.mark.parametrize("name", ALL)
def test_zeros_become_scales_that_are_legal(name: str) -> None:
    encoder, weight = ALL[name], torch.zeros(4, 64, dtype=torch.bfloat16)
    roles = encoder.encode(weight, torch.zeros(()) if encoder.needs_amax else None, PLAIN)
    made: NVFP4Weight | FP8Weight | MXFP8Weight
    if name == "nvfp4":
        made = NVFP4Weight(**roles)
    elif name == "mxfp8":
        made = MXFP8Weight(**roles)
    else:
        made = FP8Weight(**roles, block=encoder.block)
    made.check_values({})
    assert not bool(made.dequantize().any())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ALL)
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    weight = _matrix(4, 64)
    weight[1, 2] = bad
    with pytest.raises(RequestError, match="cannot be quantized"):
        ALL[name].encode(weight, torch.ones(()), PLAIN)


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from(sorted(ALL)))
@settings(max_examples=60)
def test_a_shape_fits_or_is_refused_with_the_rule(n: int, k: int, name: str) -> None:
    multiple = {"nvfp4": 16, "mxfp8": 32}.get(name, 1)
    if k % multiple:
        with pytest.raises(RequestError) as caught:
            ALL[name].layouts((n, k), PLAIN)
        assert f"multiple of {multiple}" in str(caught.value.accepted)
    else:
        assert ALL[name].layouts((n, k), PLAIN)["codes"].shape[0] == n


@pytest.mark.parametrize("name", ["nvfp4", "fp8-row"])
def test_only_matrices_are_quantized(name: str) -> None:
    with pytest.raises(RequestError):
        ALL[name].layouts((4, 4, 16), PLAIN)
