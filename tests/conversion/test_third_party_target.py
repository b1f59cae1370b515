"""A convention of another package becomes a target, without a line of the converter knowing it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conversion.int8_target import plugins_with_target
from conversion.stored import modelopt_nvfp4, plain_bf16, stored_tensors
from vtensors import RequestError, open_checkpoint
from vtensors.conversion import Assignment, parse_target, plan_conversion, run_plan
from vtensors_plugins.quantization.assigning import QuantizeOptions, assign
from vtensors_plugins.quantization.recipes import Recipe, Rule


def test_nvfp4_becomes_int8_rows_and_reads_back(tmp_path: Path) -> None:
    plugins = plugins_with_target()
    checkpoint = open_checkpoint(modelopt_nvfp4(tmp_path / "source"), plugins=plugins)
    target, scheme = parse_target(plugins, "int8-rows:int8-row")
    assert scheme == "int8-row"

    def new_scheme(module: object) -> Assignment | None:
        return Assignment(scheme="int8-row") if getattr(module, "scheme", "") == "nvfp4" else None

    with pytest.raises(RequestError, match="rounded a second time"):
        plan_conversion(checkpoint, target, new_scheme)
    run_plan(
        checkpoint, plan_conversion(checkpoint, target, new_scheme, allow_requantize=True), tmp_path / "out"
    )
    after = open_checkpoint(tmp_path / "out", plugins=plugins)
    name = "model.layers.0.mlp.up_proj"
    assert after.modules[name].convention == "int8-rows"
    before = checkpoint.read(name).dequantize()
    error = (after.read(name).dequantize() - before).abs().amax(1)
    assert bool((error <= before.abs().amax(1) / 254 * 1.001).all())
    assert after.conflicts == after.warnings == after.accounting.problems == ()


def test_a_recipe_may_name_a_third_partys_scheme(tmp_path: Path) -> None:
    plugins = plugins_with_target()
    source = plain_bf16(tmp_path / "source", {"a.up_proj": (8, 12), "lm_head": (4, 12)})
    checkpoint = open_checkpoint(source, plugins=plugins)
    target, _ = parse_target(plugins, "int8-rows")
    recipe = Recipe(name="mine", rules=(Rule(targets=("Linear",), scheme="int8-row"),))
    chosen = assign(checkpoint, recipe, target, QuantizeOptions()).assignments
    run_plan(checkpoint, plan_conversion(checkpoint, target, lambda m: chosen.get(m.name)), tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")
    assert stored["a.up_proj.weight"].dtype == "I8"
    assert stored["lm_head.weight"].dtype == "BF16"
    assert open_checkpoint(tmp_path / "out", plugins=plugins).read("a.up_proj").dequantize(
        torch.float32
    ).shape == (8, 12)


def test_what_int8_rows_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    plugins = plugins_with_target()
    checkpoint = open_checkpoint(modelopt_nvfp4(tmp_path / "source"), plugins=plugins)
    target, _ = parse_target(plugins, "int8-rows")
    with pytest.raises(RequestError, match="cannot hold this scheme") as caught:
        plan_conversion(checkpoint, target, lambda module: None)
    assert caught.value.tensor == "model.layers.0.mlp.gate_proj"
    assert caught.value.seen == "nvfp4"
