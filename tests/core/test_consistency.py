"""What the tensors of one checkpoint must have in common, and parts that two tensors give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import load, modelopt_layers, nvfp4, plain_tensors, quantised, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config
from vtensors.errors import VtensorsError
from vtensors.inspection import inspection

LLAMA = tiny_config("llama")
HYBRID = tiny_config("qwen3_5")
MOE = tiny_config("qwen3_5_moe", num_experts=2, num_experts_per_tok=1)
DOWN = "model.layers.{}.mlp.down_proj"
K_SCALE, V_SCALE = (f"model.layers.0.self_attn.{part}_proj.{part}_scale" for part in "kv")


def _refusal(folder: Path) -> str:
    """What load_model says; inspect must list the same problem."""
    with pytest.raises(VtensorsError) as caught:
        load(folder)
    problem = inspection(vtensors.open_checkpoint(folder))["problems"][0]
    assert str(caught.value).startswith(problem)
    return str(caught.value)


def _plain(tmp_path: Path, config: dict[str, object], more: dict[str, Tensor]) -> Path:
    return write_model(tmp_path / "m", config, {**plain_tensors(config), **more})


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj", "input_layernorm"])
def test_a_bias_that_the_config_does_not_announce_is_refused_by_name(tmp_path: Path, name: str) -> None:
    full = f"model.layers.1.{name}"
    rows = plain_tensors(LLAMA)[f"{full}.weight"].shape[0]
    message = _refusal(_plain(tmp_path, LLAMA, {f"{full}.bias": torch.zeros(rows, dtype=torch.bfloat16)}))
    assert f"{full}.bias: the model has no bias here" in message


def test_a_bias_that_the_config_announces_must_be_there(tmp_path: Path) -> None:
    config = {**LLAMA, "attention_bias": True}
    message = _refusal(_plain(tmp_path, config, {}))
    assert "model.layers.0.self_attn.q_proj.bias: the bias that config.json asks for" in message
    assert "and 7 more" in message


def test_a_parameter_and_a_weight_of_its_name_are_not_both_accepted(tmp_path: Path) -> None:
    name = "model.layers.0.linear_attn.A_log"
    message = _refusal(_plain(tmp_path, HYBRID, {f"{name}.weight": torch.ones(4, dtype=torch.bfloat16)}))
    assert f"gives the same as '{name}" in message
    assert f"{name}.weight" in message


@pytest.mark.parametrize("suffix", ["", ".weight", "_weight"])
def test_experts_stored_one_by_one_and_stacked_too_are_refused_naming_both(
    tmp_path: Path, suffix: str
) -> None:
    stacked = f"model.layers.0.mlp.experts.down_proj{suffix}"
    message = _refusal(_plain(tmp_path, MOE, {stacked: torch.zeros(2, 32, 16, dtype=torch.bfloat16)}))
    assert stacked in message
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in message


def test_two_spellings_of_one_stacked_tensor_are_refused_naming_both(tmp_path: Path) -> None:
    tensors = {
        n: t for n, t in plain_tensors(MOE).items() if "0.mlp.experts." not in n or "down_proj" not in n
    }
    stacked = "model.layers.0.mlp.experts.down_proj"
    tensors |= {
        stacked: torch.zeros(2, 32, 16).bfloat16(),
        f"{stacked}.weight": torch.ones(2, 32, 16).bfloat16(),
    }
    message = _refusal(write_model(tmp_path / "m", MOE, tensors))
    assert f"{stacked} and {stacked}.weight" in message or f"{stacked}.weight and {stacked}" in message


def test_a_kv_scale_under_two_names_is_refused_naming_both(tmp_path: Path) -> None:
    other = "model.layers.0.self_attn.k_scale"
    message = _refusal(_plain(tmp_path, LLAMA, {K_SCALE: torch.tensor(0.05), other: torch.tensor(0.06)}))
    assert K_SCALE in message
    assert other in message


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_a_kv_scale_that_is_no_float_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    message = _refusal(_plain(tmp_path, LLAMA, {V_SCALE: torch.ones((), dtype=dtype)}))
    assert f"{V_SCALE}: a KV-cache scale that is not a float" in message


@pytest.mark.parametrize("name", ["model.norm.weight", K_SCALE])
def test_one_float16_tensor_among_bfloat16_ones_is_refused_by_name(tmp_path: Path, name: str) -> None:
    message = _refusal(
        _plain(tmp_path, LLAMA, {name: torch.ones(32 if "norm" in name else (), dtype=torch.float16)})
    )
    assert f"{name}: F16 beside BF16: 1 of the model's tensors" in message


@pytest.mark.parametrize("scaled", [(), (0,), (0, 1)])
def test_an_activation_scale_in_some_layers_only_is_refused_naming_the_missing_one(
    tmp_path: Path, scaled: tuple[int, ...]
) -> None:
    tensors = plain_tensors(LLAMA)
    names = [DOWN.format(layer) for layer in range(2)]
    own = {name: nvfp4(name, tensors[f"{name}.weight"]) for name in names}
    for layer in scaled:
        own[names[layer]][f"{names[layer]}.pre_quant_scale"] = torch.ones(48, dtype=torch.bfloat16)
    block = modelopt_layers(dict.fromkeys(names, "NVFP4_AWQ"))
    folder = write_model(tmp_path / "m", LLAMA, quantised(tensors, own), quantization=block)
    if len(scaled) == 1:
        assert f"{names[1]}.pre_quant_scale: the activation scale is missing here" in _refusal(folder)
    else:
        load(folder)
