"""Scales of one value in every spelling, odd sizes, partial blocks: read right, or refused naming the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import IDS, load, logits, modelopt_layers, nvfp4, plain_tensors, quantised, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config
from vtensors.errors import ArchitectureError, VtensorsError
from vtensors_kernels.reference.linear import linear

MOE = tiny_config("qwen3_5_moe", num_experts=2, num_experts_per_tok=1)
NAME = "model.layers.0.mlp.down_proj"
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": [r"re:.*\.experts\.\d+\..*"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "input_activations": None,
            "format": "nvfp4-pack-quantized",
        }
    },
    "ignore": [],
}


def _experts(tmp_path: Path, publisher: str, shape: tuple[int, ...]) -> Path:
    tensors = plain_tensors(MOE)
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
        for layer in range(2)
        for expert in range(2)
        for projection in ("gate_proj", "up_proj", "down_proj")
    ]
    own = {name: nvfp4(name, tensors[f"{name}.weight"], publisher=publisher, shape=shape) for name in names}
    block = COMPRESSED if publisher != "modelopt" else modelopt_layers(dict.fromkeys(names, "NVFP4"))
    return write_model(tmp_path / f"{publisher}{shape}", MOE, quantised(tensors, own), quantization=block)


@pytest.mark.fault("B54")
def test_expert_scales_of_one_value_are_read_alike_with_and_without_a_dimension(tmp_path: Path) -> None:
    found = [
        logits(_experts(tmp_path, publisher, shape))
        for publisher in ("modelopt", "compressed-tensors")
        for shape in ((), (1,))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    # 1 / (1 / g) may differ from g in the last bit.
    assert torch.allclose(found[0], found[2], rtol=1e-4, atol=1e-4)


@pytest.mark.fault("B54")
@pytest.mark.parametrize(
    ("publisher", "suffix"), [("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")]
)
def test_an_expert_scale_of_two_values_is_refused_with_its_shape(
    tmp_path: Path, publisher: str, suffix: str
) -> None:
    with pytest.raises(VtensorsError) as caught:
        load(_experts(tmp_path, publisher, (2,)))
    assert f"model.layers.0.mlp.experts.0.down_proj.{suffix}" in str(caught.value)
    assert "of shape [] or [1]" in str(caught.value)
    assert "found F32 [2]" in str(caught.value)


# --- one linear of a model that nobody knows: reading alone -------------------------------------------------


def _module(tmp_path: Path, tensors: dict[str, Tensor], block: dict[str, Any]) -> vtensors.Checkpoint:
    checkpoint = vtensors.open_checkpoint(write_model(tmp_path / "m", {}, tensors, quantization=block))
    checkpoint.check()
    return checkpoint


@pytest.mark.fault("B68")
def test_a_block_scaled_weight_of_192_columns_works_on_one_device(tmp_path: Path) -> None:
    n, k = 160, 192
    codes = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": scale}
    weight: Any = _module(tmp_path, tensors, block).read(NAME)
    expected = codes.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert torch.equal(weight.dequantize(torch.float32), expected)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(linear(x, weight), x @ expected.T, rtol=1e-5, atol=1e-4)


@pytest.mark.fault("B69")
@pytest.mark.parametrize(
    ("n", "k"), [(n, k) for n in (8, 32, 48, 96, 4304, 7) for k in (64, 176)] + [(8, 4304)]
)
def test_an_nvfp4_weight_of_odd_sizes_is_read_and_multiplied_right(tmp_path: Path, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n * k)
    own = nvfp4(NAME, torch.randn(n, k, generator=generator))
    weight: Any = _module(tmp_path, own, modelopt_layers({NAME: "W4A16_NVFP4"})).read(NAME)
    assert weight.shape == (n, k)
    packed = own[f"{NAME}.weight"].long()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = torch.stack((table[packed & 15], table[packed >> 4]), -1).reshape(n, k)
    scale = own[f"{NAME}.weight_scale"].float() * own[f"{NAME}.weight_scale_2"]
    expected = values * scale.repeat_interleave(16, 1)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    x = torch.randn(2, k, generator=generator)
    assert torch.allclose(linear(x, weight), x @ expected.T, rtol=1e-5, atol=1e-3)


@pytest.mark.fault("B69")
@pytest.mark.fault("B98")
@pytest.mark.parametrize("groups", [2, 3])
def test_an_nvfp4_weight_whose_width_is_no_multiple_of_16_is_refused_by_name(
    tmp_path: Path, groups: int
) -> None:
    k = 40
    own = {
        f"{NAME}.weight": torch.zeros(32, k // 2, dtype=torch.uint8),
        f"{NAME}.weight_scale": torch.ones(32, groups).to(torch.float8_e4m3fn),
        f"{NAME}.weight_scale_2": torch.tensor(1.0),
    }
    with pytest.raises(VtensorsError) as caught:
        _module(tmp_path, own, modelopt_layers({NAME: "NVFP4"}))
    message = str(caught.value)
    assert f"'{NAME}.weight_scale' of shape [N, K/16]" in message
    assert "N=32, K=40" in message
    assert "K = 40 is not a multiple of 16" in message


@pytest.mark.fault("B98")
def test_a_matrix_that_does_not_fit_the_config_is_refused_with_name_shape_and_rule(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = plain_tensors(config)
    tensors[f"{NAME}.weight"] = torch.zeros(32, 40, dtype=torch.bfloat16)
    with pytest.raises(ArchitectureError) as caught:
        load(write_model(tmp_path / "m", config, tensors))
    assert f"{NAME}.weight" in str(caught.value)
    assert "[32, 40]" in str(caught.value)
    assert "[32, 48]" in str(caught.value)


def test_the_builder_of_these_tests_makes_models_that_load(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m", MOE, plain_tensors(MOE)))
    assert model.logits(IDS).isfinite().all()
