"""What a stored scale means: its sense, its bytes, its order, and that no rounding comes between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import (
    E4M3,
    NAME,
    NVFP4,
    SPELLINGS,
    by_formula,
    compressed,
    read_module,
    spread_blocks,
    stored_as,
    write_module,
)
from torch import Tensor

from vtensors_formats import NVFP4Weight
from vtensors_kernels.reference.linear import linear

N, K = 32, 64


def nvfp4(spelling: str, codes: Tensor, block_scale: Tensor, multiplier: float) -> dict[str, Tensor]:
    """The same matrix in either sense of the global scale."""
    if spelling == "modelopt-nvfp4":
        total = torch.tensor(multiplier)
        return {"weight": codes, "weight_scale": block_scale, "weight_scale_2": total}
    total = torch.tensor([1 / multiplier])
    return {"weight_packed": codes, "weight_scale": block_scale, "weight_global_scale": total}


def _bytes(value: int, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.uint8)


@pytest.mark.fault("B01")
@pytest.mark.parametrize("spelling", NVFP4)
def test_a_global_scale_multiplies_in_modelopt_and_divides_in_compressed_tensors(
    tmp_path: Path, spelling: str
) -> None:
    tensors = nvfp4(spelling, _bytes(0x21, N, K // 2), _bytes(0x40, N, K // 16).view(E4M3), 0.25)
    values = read_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    assert torch.equal(values, torch.tensor([0.25, 0.5]).repeat(N, K // 2))


@pytest.mark.fault("B01")
def test_an_input_scale_multiplies_in_modelopt_and_divides_in_compressed_tensors(tmp_path: Path) -> None:
    four_bit = {"type": "float", "num_bits": 4, "dynamic": "local", "group_size": 16}
    group = {**SPELLINGS["compressed-nvfp4"].group, "input_activations": four_bit, "targets": ["Linear"]}
    x = torch.linspace(-3, 3, K).reshape(1, K)
    found = []
    for spelling, suffix, value, block in (
        ("modelopt-nvfp4", "input_scale", torch.tensor(1 / 64), {"quant_algo": "NVFP4"}),
        ("compressed-nvfp4", "input_global_scale", torch.tensor([64.0]), compressed(group_0=group)),
    ):
        tensors = nvfp4(spelling, _bytes(0x21, N, K // 2), _bytes(0x40, N, K // 16).view(E4M3), 0.25)
        checkpoint = write_module(tmp_path / spelling, {**tensors, suffix: value}, block)
        weight = checkpoint.read(NAME)
        assert isinstance(weight, NVFP4Weight)
        assert weight.activation is not None
        found.append(weight.activation(x))
    assert torch.equal(*found)
    assert torch.allclose(found[0], x, atol=0.5)


@pytest.mark.fault("B17")
@pytest.mark.parametrize("spelling", NVFP4)
def test_the_low_nibble_is_the_even_column(tmp_path: Path, spelling: str) -> None:
    tensors = nvfp4(spelling, _bytes(0x12, N, K // 2), _bytes(0x40, N, K // 16).view(E4M3), 0.25)
    values = read_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    assert torch.equal(values, torch.tensor([0.5, 0.25]).repeat(N, K // 2))


@pytest.mark.fault("B02")
@pytest.mark.parametrize("spelling", NVFP4)
def test_each_row_is_scaled_by_its_own_linear_block_scales(tmp_path: Path, spelling: str) -> None:
    # Both axes tell their place: a 128 x 4 swizzle cannot hide.
    bytes_ = ((torch.arange(256).reshape(-1, 1) % 100) + torch.arange(8) + 8).to(torch.uint8)
    tensors = nvfp4(spelling, _bytes(0x22, 256, 64), bytes_.view(E4M3), 0.25)
    values = read_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    assert torch.equal(values, bytes_.view(E4M3).float().repeat_interleave(16, 1) * 0.25)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("spelling", NVFP4)
def test_no_block_scale_is_flushed_to_zero_under_bfloat16_activations(tmp_path: Path, spelling: str) -> None:
    every = torch.arange(1, 127, dtype=torch.uint8).reshape(-1, 1)  # 0x01 = 2^-9 to 0x7E = 448
    tensors = nvfp4(spelling, _bytes(0x22, 126, 8), every.view(E4M3), 1.0)
    checkpoint = write_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    weight: Any = checkpoint.read(NAME)
    out = linear(torch.ones(1, 16, dtype=torch.bfloat16), weight)
    # Sixteen times an E4M3 value has four significant bits: exact in bfloat16.
    assert torch.equal(out.float(), 16 * every.view(E4M3).float().T)


@pytest.mark.fault("B10")
@pytest.mark.parametrize("spelling", NVFP4)
def test_float16_activations_do_not_overflow_before_the_global_scale(tmp_path: Path, spelling: str) -> None:
    tensors = nvfp4(spelling, _bytes(0x77, N, 2048), _bytes(0x7E, N, 256).view(E4M3), 1e-4)
    checkpoint = write_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    weight: Any = checkpoint.read(NAME)
    out = linear(torch.ones(1, 4096, dtype=torch.float16), weight)
    assert torch.allclose(out.float(), torch.full((1, N), 6 * 448 * 4096e-4), rtol=1e-3)


@pytest.mark.fault("B11")
@pytest.mark.parametrize("spelling", NVFP4)
@pytest.mark.parametrize("stored", [0.00041069428, 0.00037, 5334.0])
def test_a_stored_global_scale_is_kept_and_never_replaced_by_its_reciprocal(
    tmp_path: Path, spelling: str, stored: float
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(4).reshape(N, K // 2)
    scale = torch.linspace(0.5, 448, N * K // 16).reshape(N, K // 16).to(E4M3)
    tensors = nvfp4(spelling, codes, scale, 1.0)
    total = "weight_scale_2" if spelling == "modelopt-nvfp4" else "weight_global_scale"
    tensors[total] = torch.full_like(tensors[total], stored)
    checkpoint = write_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    weight = checkpoint.read(NAME)
    assert isinstance(weight, NVFP4Weight)
    kept = weight.global_scale if weight.global_scale is not None else weight.global_divisor
    assert kept is not None
    assert torch.equal(kept.reshape(()), torch.tensor(stored))
    assert torch.equal(weight.dequantize(torch.float32), by_formula(tensors))


@pytest.mark.fault("B14")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", [s.name for s in SPELLINGS.values() if s.scheme == "fp8-block"])
@pytest.mark.parametrize("said", [{}, {"scale_fmt": "ue8m0"}], ids=["", "ue8m0"])
def test_block_scales_that_are_no_powers_of_two_are_used_as_they_are(
    tmp_path: Path, spelling: str, dtype: torch.dtype, said: dict[str, str]
) -> None:
    suffix = "weight_scale_inv" if spelling.startswith("hf") else "weight_scale"
    codes = (torch.arange(128 * 128) % 127).to(torch.uint8).reshape(128, 128).view(E4M3)
    scale = torch.full((8, 8), 0.0021).to(dtype)
    block = {**SPELLINGS[spelling].declaration([NAME]), **said}
    values = read_module(tmp_path, {"weight": codes, suffix: scale}, block)
    assert torch.equal(values, codes.float() * float(scale[0, 0]))


EXPONENTS = torch.tensor([120, 125, 127, 130, 140], dtype=torch.uint8)
MEANT = torch.tensor([2.0**-7, 0.25, 1.0, 8.0, 8192.0])
_MXFP8 = {"format": "mxfp8-quantized", "input_activations": None, "targets": ["Linear"]}
_MX_WEIGHTS = {"type": "float", "num_bits": 8, "group_size": 32, "strategy": "group"}
MX_FORMS = {
    "modelopt": ("weight_scale", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, 32),
    "compressed": ("weight_scale", compressed(group_0={**_MXFP8, "weights": _MX_WEIGHTS}), 32),
    "hf-mxfp8": ("weight_scale_inv", {"quant_method": "mxfp8", "activation_scheme": "dynamic"}, 32),
    "hf-block": (
        "weight_scale_inv",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        128,
    ),
}


@pytest.mark.fault("B15")
@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
@pytest.mark.parametrize("form", MX_FORMS)
def test_e8m0_scales_are_exponents_in_either_dtype(tmp_path: Path, form: str, dtype: str) -> None:
    suffix, block, width = MX_FORMS[form]
    rows = 1 if width == 128 else N
    scale = stored_as(EXPONENTS.repeat(rows, 1), dtype)
    codes = _bytes(0x38, N, 5 * width).view(E4M3)  # all 1.0
    values = read_module(tmp_path, {"weight": codes, suffix: scale}, block)
    assert torch.equal(values, spread_blocks(MEANT.repeat(N, 1), (N, 5 * width), width)[:N])


@pytest.mark.parametrize("method", [{}, {"weight_block_size": [1, 32]}], ids=["bare", "spelled"])
def test_mxfp8_of_transformers_is_mxfp8_with_and_without_its_block(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    suffix, block, width = MX_FORMS["hf-mxfp8"]
    scale = stored_as(EXPONENTS.repeat(N, 1), "U8")
    checkpoint = write_module(
        tmp_path, {"weight": _bytes(0x38, N, 5 * width).view(E4M3), suffix: scale}, {**block, **method}
    )
    assert checkpoint.modules[NAME].scheme == "mxfp8"
    weight: Any = checkpoint.read(NAME)
    assert type(weight.activation).__name__ == "MXFP8Activation"
    assert checkpoint.conflicts == ()
