"""Declarations in spellings that readers accept and today's writers do not use, and ones about other weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import SPELLINGS
from tiny_models import load, logits, modelopt_layers, nvfp4, plain_tensors, quantised, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config
from vtensors.errors import DeclarationError, RequestError
from vtensors.inspection import inspection
from vtensors_plugins.architectures.checkpoint_inputs import config_dtype
from vtensors_plugins.architectures.outline import outline

CONFIG = tiny_config("llama")
TENSORS = plain_tensors(CONFIG)
DOWN = "model.layers.0.mlp.down_proj"
WEIGHT = TENSORS[f"{DOWN}.weight"]
FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quant_method": "modelopt"}


def packed(**extra: Tensor) -> dict[str, Tensor]:
    """One NVFP4 module as ModelOpt writes it, and tensors beside it."""
    more = {f"{DOWN}.{suffix}": tensor for suffix, tensor in extra.items()}
    return quantised(TENSORS, {DOWN: {**nvfp4(DOWN, WEIGHT), **more}})


def as_row_fp8(**extra: Tensor) -> dict[str, Tensor]:
    """One FP8 module with a scale per row, and tensors beside it."""
    more = {f"{DOWN}.{suffix}": tensor for suffix, tensor in extra.items()}
    own = SPELLINGS["modelopt-fp8-row"].stored(DOWN, WEIGHT.float())
    return quantised(TENSORS, {DOWN: {**own, **more}})


# --- ModelOpt ----------------------------------------------------------------------------------------------


@pytest.mark.fault("B63")
@pytest.mark.parametrize("method", [{"quant_method": "modelopt"}, {}], ids=["method", "no-method"])
def test_the_object_of_hf_quant_config_may_stand_whole_in_config_json(
    tmp_path: Path, method: Mapping[str, Any]
) -> None:
    layers = modelopt_layers({DOWN: "NVFP4"})
    nested = {**method, "producer": MODELOPT["producer"], "quantization": layers}
    whole = write_model(tmp_path / "nested", CONFIG, packed(), quantization=nested)
    checkpoint = vtensors.open_checkpoint(whole)
    checkpoint.check()
    module = checkpoint.modules[DOWN]
    assert (module.convention, module.algorithm) == ("modelopt", "NVFP4")
    assert checkpoint.conflicts == ()
    assert torch.equal(
        logits(whole), logits(write_model(tmp_path / "flat", CONFIG, packed(), quantization=layers))
    )


@pytest.mark.fault("B64")
@pytest.mark.parametrize(
    "options",
    [
        # What nvidia-modelopt 0.47 writes where only the cache is quantised.
        {"quantization": {**MODELOPT, "ignore": [], "kv_cache_scheme": FP8_CACHE}},
        {"hf_quant": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}},
    ],
    ids=["config", "hf_quant_config"],
)
def test_modelopt_may_quantise_nothing_but_the_kv_cache(tmp_path: Path, options: dict[str, Any]) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{what}_proj.{what}_scale": torch.tensor(0.05)
        for layer in range(2)
        for what in "kv"
    }
    folder = write_model(tmp_path / "kv", CONFIG, {**TENSORS, **scales}, **options)
    checkpoint = vtensors.open_checkpoint(folder)
    checkpoint.check()
    declared = [c.declaration.kv_cache for c in checkpoint.claimants if c.declaration]
    assert [kv.algorithm for kv in declared if kv] == ["FP8"]
    assert checkpoint.conflicts == ()
    assert torch.equal(logits(folder), logits(write_model(tmp_path / "plain", CONFIG, TENSORS)))


@pytest.mark.fault("B50")
def test_packed_weights_under_a_null_algorithm_of_the_whole_file_are_read_and_warned_of(
    tmp_path: Path,
) -> None:
    null = {"producer": MODELOPT["producer"], "quantization": {"quant_algo": None, "exclude_modules": []}}
    folder = write_model(tmp_path / "null", CONFIG, packed(), hf_quant=null)
    model = load(folder)
    assert model.checkpoint.modules[DOWN].scheme == "nvfp4"
    assert [conflict.where for conflict in model.checkpoint.conflicts] == [DOWN]
    assert "quant_algo is null" in model.checkpoint.conflicts[0].says


def test_a_modelopt_block_that_says_nothing_at_all_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", CONFIG, TENSORS, quantization={"quant_method": "modelopt"})
    with pytest.raises(DeclarationError, match="'modelopt'"):
        vtensors.open_checkpoint(folder)


def test_a_null_algorithm_in_the_old_file_does_not_contest_another_convention(tmp_path: Path) -> None:
    spelling = SPELLINGS["compressed-fp8-row"]
    tensors = quantised(TENSORS, {DOWN: spelling.stored(DOWN, WEIGHT.float())})
    folder = write_model(
        tmp_path / "m",
        CONFIG,
        tensors,
        quantization=spelling.declaration([DOWN]),
        hf_quant={"quantization": {"quant_algo": None}},
    )
    assert load(folder).checkpoint.modules[DOWN].convention == "compressed-tensors"


@pytest.mark.fault("B45")
@pytest.mark.parametrize("files", ["", "model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("says", ["", "model.", "model.language_model."])
def test_a_table_of_layers_in_another_prefix_dialect_is_found(tmp_path: Path, files: str, says: str) -> None:
    def moved(name: str) -> str:
        return name.replace("model.", files, 1)

    tensors = {moved(name): tensor for name, tensor in packed().items()}
    listed = modelopt_layers({DOWN.replace("model.", says, 1): "W4A16_NVFP4"})
    checkpoint = vtensors.open_checkpoint(write_model(tmp_path, CONFIG, tensors, quantization=listed))
    assert checkpoint.modules[moved(DOWN)].algorithm == "W4A16_NVFP4"
    assert checkpoint.conflicts == ()


# --- compressed-tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["nested", "empty-transforms", "activations-only"])
def test_other_spellings_of_a_compressed_tensors_block_mean_the_same(tmp_path: Path, change: str) -> None:
    spelling = SPELLINGS["compressed-nvfp4"]
    tensors = quantised(TENSORS, {DOWN: spelling.stored(DOWN, WEIGHT.float())})
    block: dict[str, Any] = spelling.declaration([DOWN])
    plain = logits(write_model(tmp_path / "plain", CONFIG, tensors, quantization=block))
    if change == "nested":
        block = {"quant_method": "compressed-tensors", "quantization_config": block, "sparsity_config": {}}
    elif change == "empty-transforms":
        block["transform_config"] = {"config_groups": {}}
    else:
        block["format"] = "nvfp4-pack-quantized"
        attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": FP8_CACHE}
        block["config_groups"]["group_1"] = attention
    folder = write_model(tmp_path / "other", CONFIG, tensors, quantization=block)
    assert torch.equal(logits(folder), plain)
    assert vtensors.open_checkpoint(folder).modules[DOWN].algorithm == "nvfp4-pack-quantized"


def test_a_group_with_a_format_of_its_own_and_no_weights_is_refused(tmp_path: Path) -> None:
    block = SPELLINGS["compressed-nvfp4"].declaration([DOWN])
    block["config_groups"]["group_0"]["weights"] = None
    folder = write_model(tmp_path, CONFIG, TENSORS, quantization=block)
    with pytest.raises(DeclarationError, match="weights is missing"):
        vtensors.open_checkpoint(folder)


# --- declared for other weights ----------------------------------------------------------------------------


@pytest.mark.fault("B32")
@pytest.mark.parametrize("stored", ["nvfp4", "fp8"])
def test_activations_that_are_declared_for_weights_of_another_kind_are_not_run(
    tmp_path: Path, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    scale = torch.tensor(0.01)
    tensors = packed(input_scale=scale)
    if stored == "fp8":
        own = SPELLINGS["modelopt-fp8-tensor"].stored(DOWN, WEIGHT.float())
        tensors = quantised(TENSORS, {DOWN: {**own, f"{DOWN}.input_scale": scale}})
    wrong = {"quant_method": "modelopt", "quant_algo": "FP8" if stored == "nvfp4" else "NVFP4"}
    folder = write_model(tmp_path, CONFIG, tensors, quantization=wrong)
    with caplog.at_level(logging.WARNING, "vtensors"):
        as_declared = logits(folder, activations="declared")
    assert torch.equal(as_declared, logits(folder))
    assert any("weights of another kind" in record.getMessage() for record in caplog.records)


@pytest.mark.fault("B67")
@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors", "hf-fp8"])
def test_an_input_scale_beside_dynamic_activations_is_listed_and_not_used(
    tmp_path: Path, convention: str
) -> None:
    name = {"modelopt": "modelopt-fp8-row", "compressed-tensors": "compressed-fp8-row"}.get(convention)
    spelling = SPELLINGS[name or "hf-fp8-tensor"]
    own = spelling.stored(DOWN, WEIGHT.float())
    if convention == "compressed-tensors":
        # Looked at when it is read, which planning does without values.
        own[f"{DOWN}.weight_zero_point"] = torch.zeros(1, dtype=torch.int8)
    others = sorted({tensor.removesuffix(".weight") for tensor in TENSORS} - {DOWN})
    block = spelling.declaration([DOWN], others)

    def written(place: str, more: Mapping[str, Tensor]) -> Path:
        return write_model(
            tmp_path / place, CONFIG, quantised(TENSORS, {DOWN: {**own, **more}}), quantization=block
        )

    beside = written("with", {f"{DOWN}.input_scale": torch.tensor(0.01)})
    without = written("without", {})
    assert torch.equal(logits(beside, activations="declared"), logits(without, activations="declared"))
    assert not torch.equal(logits(beside, activations="declared"), logits(without))
    checkpoint = vtensors.open_checkpoint(beside)
    on_hopper = outline(
        checkpoint,
        device="cuda:0",
        capability=(9, 0),
        dtype="bfloat16",
        activations="declared",
        assumed=True,
    )
    (group,) = [group for group in on_hopper if DOWN in group.modules]
    assert group.request.activations == "fp8-dynamic"
    waived = inspection(checkpoint)["waived"]
    assert [row["tensors"] for row in waived if "dynamic activations" in row["reason"]] == [1]


# --- config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_dtype_is_found_under_both_keys_in_either_part_of_config_json(
    tmp_path: Path, key: str, nested: bool
) -> None:
    folder = write_model(tmp_path, {"text_config": CONFIG, "model_type": "llama"}, TENSORS)
    config: dict[str, Any] = {"text_config": dict(CONFIG), "model_type": "llama"}
    (config["text_config"] if nested else config)[key] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    assert config_dtype(vtensors.open_checkpoint(folder)) == torch.bfloat16


@pytest.mark.parametrize("named", [None, "float8_e4m3fn"])
def test_where_config_json_names_no_dtype_to_compute_in_the_stored_one_is_taken(
    tmp_path: Path, named: str | None
) -> None:
    def dtype_of(place: str, tensors: Mapping[str, Tensor], name: str | None) -> torch.dtype:
        folder = write_model(tmp_path / place, {**CONFIG, "dtype": name}, tensors)
        return config_dtype(vtensors.open_checkpoint(folder))

    assert dtype_of("bf16", TENSORS, named) == torch.bfloat16
    assert dtype_of("f16", {name: value.half() for name, value in TENSORS.items()}, named) == torch.float16
    with pytest.raises(RequestError, match="does not name a dtype"):
        dtype_of("f32", {name: value.float() for name, value in TENSORS.items()}, named)
    with pytest.raises(RequestError, match="'float64'"):
        dtype_of("f64", TENSORS, "float64")


# --- inverted scales ---------------------------------------------------------------------------------------


@pytest.mark.fault("B01")
@pytest.mark.parametrize(
    "spelling", ["modelopt-nvfp4", "compressed-nvfp4", "modelopt-fp8-tensor", "hf-fp8-block"]
)
def test_a_model_whose_scales_look_inverted_is_warned_of_once(
    tmp_path: Path, spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    how = SPELLINGS[spelling]
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    own = {name: how.stored(name, TENSORS[f"{name}.weight"].float()) for name in names}
    others = sorted({tensor.removesuffix(".weight") for tensor in TENSORS} - set(names))

    def warnings(place: str) -> list[str]:
        caplog.clear()
        folder = write_model(
            tmp_path / place, CONFIG, quantised(TENSORS, own), quantization=how.declaration(names, others)
        )
        with caplog.at_level(logging.WARNING, "vtensors"):
            load(folder)
        return [r.getMessage() for r in caplog.records if "no calibration gives" in r.getMessage()]

    assert warnings("right") == []
    for tensors in own.values():
        for name in tensors:
            is_scale = name.endswith(("_scale_2", "global_scale", "_scale_inv", "weight_scale"))
            if is_scale and tensors[name].dtype == torch.float32:
                tensors[name] = 1 / tensors[name]
    told = warnings("inverted")
    assert len(told) == 1
    assert told[0].startswith("layers.0.mlp.down_proj: ")
