"""Declarations that are missing, empty, nested, unknown, or contradict each other."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import IDS, load, modelopt_layers, nvfp4, plain_tensors, quantised, write_model

import vtensors
from tiny_decoders import tiny_config
from vtensors.errors import DeclarationError, VtensorsError
from vtensors.inspection import inspection

CONFIG = tiny_config("llama")
TENSORS = plain_tensors(CONFIG)
DOWN = "model.layers.0.mlp.down_proj"
QUANTISED = quantised(TENSORS, {DOWN: nvfp4(DOWN, TENSORS[f"{DOWN}.weight"])})
LAYERS = modelopt_layers({DOWN: "NVFP4"})
LEGACY = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {name: value for name, value in LAYERS.items() if name != "quant_method"},
}


def _write(tmp_path: Path, **options: Any) -> Path:
    return write_model(tmp_path / "m", CONFIG, QUANTISED, **options)


@pytest.mark.fault("B62")
def test_packed_weights_without_a_declaration_are_refused_naming_both_files(tmp_path: Path) -> None:
    with pytest.raises(VtensorsError) as caught:
        load(_write(tmp_path))
    message = str(caught.value)
    assert "1 module looks like modelopt, but no quantization_config was found in config.json" in message
    assert "hf_quant_config.json" in message
    assert all(f"{DOWN}.{suffix}" in message for suffix in ("weight", "weight_scale", "weight_scale_2"))


@pytest.mark.fault("B63")
@pytest.mark.parametrize(
    "options",
    [
        {"hf_quant": LEGACY},
        {"quantization": LAYERS},
        {"quantization": LAYERS, "hf_quant": LEGACY},
        {"quantization": {**LAYERS, "quant_method": ""}, "hf_quant": LEGACY},
        {"quantization": {name: value for name, value in LAYERS.items() if name != "quant_method"}},
    ],
    ids=["hf_quant_config", "config", "both", "empty-method-and-hf_quant_config", "no-method"],
)
def test_a_declaration_in_either_file_is_followed(tmp_path: Path, options: dict[str, Any]) -> None:
    model = load(_write(tmp_path, **options))
    module = model.checkpoint.modules[DOWN]
    assert (module.convention, module.scheme, module.algorithm) == ("modelopt", "nvfp4", "NVFP4")
    assert model.checkpoint.conflicts == ()


@pytest.mark.fault("B63")
def test_an_empty_quant_method_is_shown_in_quotes_with_both_files(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError) as caught:
        load(_write(tmp_path, quantization={"quant_method": ""}))
    assert "quant_method ''" in str(caught.value)
    assert "config.json: quantization_config" in str(caught.value)
    assert "hf_quant_config.json absent" in str(caught.value)


@pytest.mark.fault("B63")
def test_a_compressed_tensors_format_without_groups_is_refused_showing_the_value(tmp_path: Path) -> None:
    block = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    with pytest.raises(DeclarationError) as caught:
        load(_write(tmp_path, quantization=block))
    assert "format 'nvfp4-pack-quantized', config_groups None" in str(caught.value)


@pytest.mark.fault("B64")
@pytest.mark.parametrize("where", ["hf_quant_config.json", "config.json"])
def test_a_kv_cache_that_only_one_file_declares_is_followed_and_reported(tmp_path: Path, where: str) -> None:
    legacy, block = LEGACY, dict(LAYERS)
    if where == "config.json":
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    else:
        legacy = {**LEGACY, "quantization": {**LEGACY["quantization"], "kv_cache_quant_algo": "FP8"}}
    checkpoint = vtensors.open_checkpoint(_write(tmp_path, quantization=block, hf_quant=legacy))
    assert checkpoint.kv_cache is not None
    assert (checkpoint.kv_cache.algorithm, checkpoint.kv_cache.where.partition(":")[0]) == ("FP8", where)
    report = inspection(checkpoint)
    assert report["kv_cache"]["declared"] == "FP8"
    (conflict,) = report["conflicts"]
    assert "KV cache" in conflict["where"]
    assert conflict["chosen"] == "FP8"


@pytest.mark.fault("B65")
def test_a_declaration_inside_text_config_speaks_of_the_text_model_only(tmp_path: Path) -> None:
    text = {**CONFIG, "quantization_config": {**LAYERS, "quant_algo": "NVFP4"}}
    del text["quantization_config"]["quantized_layers"]
    vision = "model.visual.blocks.0.mlp.fc1"
    tensors = QUANTISED | {f"{vision}.weight": torch.ones(32, 32).bfloat16()}
    nested = {"model_type": "llama", "text_config": text}
    checkpoint = vtensors.open_checkpoint(write_model(tmp_path / "m", nested, tensors))
    checkpoint.check()
    assert checkpoint.modules[DOWN].scheme == "nvfp4"
    assert checkpoint.modules[vision].declared_scheme is None
    assert all("visual" not in conflict.where for conflict in checkpoint.conflicts)
    # The text model's own BF16 matrices do contradict it.
    assert any("up_proj" in conflict.where for conflict in checkpoint.conflicts)


@pytest.mark.fault("B66")
def test_an_unknown_quant_method_is_an_error_that_lists_the_conventions(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError) as caught:
        load(_write(tmp_path, quantization={"quant_method": "foo"}))
    message = str(caught.value)
    assert "quant_method 'foo'" in message
    assert all(name in message for name in ("modelopt", "compressed-tensors", "hf-fp8", "plain"))
    assert "docs/writing-a-plugin.md" in message


@pytest.mark.fault("B67")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_input_scale_of_an_fp8_delta_net_projection_is_used_or_listed(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    config = tiny_config("qwen3_5")
    tensors = plain_tensors(config)
    name = "model.layers.0.linear_attn.in_proj_qkv"
    own = {
        f"{name}.weight": tensors[f"{name}.weight"].to(torch.float8_e4m3fn),
        f"{name}.weight_scale": torch.tensor(1.0),
        f"{name}.input_scale": torch.full(shape, 0.02),
    }
    folder = write_model(
        tmp_path / "m", config, quantised(tensors, {name: own}), quantization=modelopt_layers({name: "FP8"})
    )
    sixteen, declared = load(folder), load(folder, activations="declared")
    assert declared.checkpoint.executed(name, declared.request).activations == "fp8-static"
    assert not torch.equal(sixteen.logits(IDS), declared.logits(IDS))
    # 448 * 0.02 holds any input here, so that only the rounding of one layer's input to E4M3 (2^-4) differs.
    assert (sixteen.logits(IDS) - declared.logits(IDS)).norm() < 0.125 * sixteen.logits(IDS).norm()
    dynamic = modelopt_layers({name: "FP8_PER_CHANNEL_PER_TOKEN"})
    own[f"{name}.weight_scale"] = torch.ones(len(own[f"{name}.weight"]))
    folder = write_model(tmp_path / "d", config, quantised(tensors, {name: own}), quantization=dynamic)
    waived = vtensors.open_checkpoint(folder).accounting.waived
    assert waived == {"input scale beside dynamic activations: not used": (f"{name}.input_scale",)}


# --- KV-cache scales ----------------------------------------------------------------------------------------


@pytest.mark.fault("B97")
@pytest.mark.parametrize(
    ("kind", "warnings"), [("none", 0), ("declared-with-scales", 0), ("declared-without-scales", 1)]
)
def test_only_an_fp8_cache_without_scales_is_warned_of_and_once(
    tmp_path: Path, kind: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = dict(TENSORS)
    block = None
    if kind != "none":
        block = {**modelopt_layers({}), "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
    if kind == "declared-with-scales":
        for layer in range(2):
            for part, value in (("k", 0.05), ("v", 0.08)):
                tensors[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = torch.tensor(value)
    folder = write_model(tmp_path / "m", CONFIG, tensors, quantization=block)
    with caplog.at_level(logging.WARNING, "vtensors"):
        load(folder, kv_cache_dtype="auto" if kind == "none" else "fp8")
    told = [record for record in caplog.records if "scale" in record.getMessage()]
    assert len(told) == warnings
