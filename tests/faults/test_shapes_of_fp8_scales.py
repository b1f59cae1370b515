"""An FP8 scale's granularity is read from its shape, under any of its names; other shapes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import E4M3, NAME, compressed, write_module

from vtensors.errors import ClaimError, VtensorsError, WeightValueError

N, K = 32, 64
CODES = (torch.arange(N * K) % 120).to(torch.uint8).reshape(N, K).view(E4M3)
_FP8 = {"targets": ["Linear"], "format": "float-quantized", "input_activations": None}
_WEIGHTS = {"type": "float", "num_bits": 8, "symmetric": True}
# Every block may be met by every shape: what is declared does not decide.
DECLARED: dict[str, dict[str, Any]] = {
    "modelopt-tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt-row": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "modelopt-block": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    "compressed-tensor": compressed(group_0={**_FP8, "weights": {**_WEIGHTS, "strategy": "tensor"}}),
    "compressed-row": compressed(group_0={**_FP8, "weights": {**_WEIGHTS, "strategy": "channel"}}),
    "hf-fp8-tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "hf-fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
SHAPES: dict[tuple[int, ...], str] = {(): "tensor", (1,): "tensor", (N,): "row", (N, 1): "row"}


@pytest.mark.fault("B13")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("declared", DECLARED)
def test_the_shape_of_weight_scale_decides_whether_it_is_per_tensor_or_per_row(
    tmp_path: Path, declared: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    count = N if N in shape else 1
    scale = torch.linspace(0.5, 1.5, count).to(dtype).reshape(shape)
    checkpoint = write_module(tmp_path, {"weight": CODES, "weight_scale": scale}, DECLARED[declared])
    checkpoint.check()
    weight: Any = checkpoint.read(NAME)
    assert torch.equal(weight.dequantize(torch.float32), CODES.float() * scale.float().reshape(count, 1))
    assert weight.shape == (N, K)
    # A collapsed block scale is one block; otherwise the scheme is the shape's.
    collapsed = declared == "modelopt-block" and SHAPES[shape] == "tensor"
    assert weight.scheme == ("fp8-block" if collapsed else f"fp8-{SHAPES[shape]}")


@pytest.mark.fault("B13")
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("declared", ["modelopt-tensor", "modelopt-block", "hf-fp8-tensor", "hf-fp8-block"])
def test_one_weight_scale_inv_scales_the_whole_matrix_and_multiplies(
    tmp_path: Path, declared: str, shape: tuple[int, ...]
) -> None:
    tensors = {"weight": CODES, "weight_scale_inv": torch.full(shape, 0.25)}
    checkpoint = write_module(tmp_path, tensors, DECLARED[declared])
    if len(shape) == 4 and declared.startswith("hf"):  # only ModelOpt writes four dimensions
        with pytest.raises(ClaimError, match=r"found F32 \[1, 1, 1, 1\]"):
            checkpoint.check()
        return
    checkpoint.check()
    weight: Any = checkpoint.read(NAME)
    assert torch.equal(weight.dequantize(torch.float32), CODES.float() * 0.25)


@pytest.mark.fault("B13")
@pytest.mark.parametrize("shape", [(2,), (N + 1,), (K,), (1, K), (N, 2), (2, 2), (N, 1, 1)], ids=str)
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("declared", DECLARED)
def test_a_scale_of_any_other_shape_is_refused_with_the_accepted_ones(
    tmp_path: Path, declared: str, suffix: str, shape: tuple[int, ...]
) -> None:
    tensors = {"weight": CODES, suffix: torch.ones(shape)}
    checkpoint = write_module(tmp_path, tensors, DECLARED[declared])
    for refused in (checkpoint.check, lambda: checkpoint.read(NAME)):
        with pytest.raises(VtensorsError) as caught:
            refused()
        message = str(caught.value)
        assert f"{suffix} F32 {list(shape)}" in message
        if suffix == "weight_scale" or not declared.startswith("compressed"):
            assert f"wants '{NAME}.{suffix}' of shape [" in message
        else:
            assert f"has no place for '{NAME}.{suffix}' (places: weight, weight_scale" in message


@pytest.mark.fault("B15")
@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_e8m0_scale_of_the_whole_matrix_is_an_exponent(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    # transformers 5.24 writes [1, 1] where `weight_block_size` is null and `scale_fmt` is `ue8m0`.
    tensors = {"weight": CODES, "weight_scale_inv": (dtype, shape, bytes([120]))}
    block = {"quant_method": "fp8", "weight_block_size": None, "scale_fmt": "ue8m0"}
    checkpoint = write_module(tmp_path, tensors, block)
    checkpoint.check()
    weight: Any = checkpoint.read(NAME)
    assert (weight.scheme, checkpoint.conflicts) == ("fp8-tensor", ())
    assert torch.equal(weight.dequantize(torch.float32), CODES.float() * 2.0**-7)
    tensors["weight_scale_inv"] = (dtype, shape, b"\xff")
    with pytest.raises(WeightValueError, match="weight_scale_inv"):
        write_module(tmp_path / "nan", tensors, block).read(NAME)
