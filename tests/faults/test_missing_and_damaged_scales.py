"""Scales that are not there, that hold impossible values, or that go by an unknown name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import NAME, NVFP4, SPELLINGS, compressed, write_module
from tiny_models import load, plain_tensors, quantised, write_model
from torch import Tensor

from tiny_decoders import tiny_config
from vtensors.errors import ClaimError, VtensorsError, WeightValueError

WEIGHT = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
MOE = tiny_config("qwen3_5_moe", num_experts=4)
FOUR_BIT = {"type": "float", "num_bits": 4, "dynamic": "local", "strategy": "tensor_group", "group_size": 16}
INPUT = {"modelopt-nvfp4": ("input_scale", 1 / 512), "compressed-nvfp4": ("input_global_scale", 512.0)}
SCALE_NAMES = "weight_scale, weight_scale_inv"
SCALES = [
    (spelling, suffix)
    for spelling, found in SPELLINGS.items()
    for suffix in found.encode(WEIGHT)
    if "scale" in suffix
]


def w4a4(spelling: str) -> dict[str, Any]:
    """The block that declares NVFP4 with 4-bit activations for every linear."""
    if spelling == "modelopt-nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    group = {**SPELLINGS[spelling].group, "input_activations": FOUR_BIT, "targets": ["Linear"]}
    return compressed(group_0=group)


def expert_model(spelling: str, without: str = "") -> dict[str, Tensor]:
    """A mixture of four experts, all NVFP4 with input scales, less one tensor."""
    tensors = plain_tensors(MOE)
    suffix, value = INPUT[spelling]
    modules = {}
    for full in tensors:
        name = full.removesuffix(".weight")
        if ".experts." in name:
            modules[name] = SPELLINGS[spelling].stored(name, tensors[full])
            modules[name][f"{name}.{suffix}"] = torch.tensor([value])
    found = quantised(tensors, modules)
    found.pop(without, None)
    return found


@pytest.mark.fault("B03")
@pytest.mark.parametrize("spelling", NVFP4)
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_without_an_input_scale_runs_weight_only_and_is_named(
    tmp_path: Path, spelling: str, projection: str, caplog: pytest.LogCaptureFixture
) -> None:
    expert = f"model.layers.0.mlp.experts.2.{projection}"
    without = f"{expert}.{INPUT[spelling][0]}"
    folder = write_model(tmp_path, MOE, expert_model(spelling, without), quantization=w4a4(spelling))
    model = load(folder, activations="declared")
    (told,) = [r.getMessage() for r in caplog.records if "input_scale" in r.getMessage()]
    assert expert in told
    assert "16-bit activations" in told
    assert model.checkpoint.executed(expert, model.request).activations == "16bit"
    assert model.checkpoint.executed(expert.replace("2", "1"), model.request).activations == "fp4"
    # Every token once, so that every expert is met.
    found = model.logits(torch.arange(model.vocab_size).reshape(1, -1))
    assert bool(torch.isfinite(found).all())


@pytest.mark.fault("B04")
@pytest.mark.parametrize(("spelling", "suffix"), SCALES)
def test_a_weight_without_its_scale_is_refused_naming_it(tmp_path: Path, spelling: str, suffix: str) -> None:
    found = SPELLINGS[spelling]
    tensors = found.encode(WEIGHT)
    del tensors[suffix]
    checkpoint = write_module(tmp_path, tensors, found.declaration([NAME]))
    for refused in (checkpoint.check, lambda: checkpoint.read(NAME)):
        with pytest.raises(ClaimError) as caught:
            refused()
        message = str(caught.value)
        assert NAME in message
        # Either the form lacks it, or an FP8 weight stands alone and the known names are told.
        assert f"needs '{NAME}.{suffix}', which is missing" in message or f"known: {SCALE_NAMES}" in message


@pytest.mark.fault("B04")
@pytest.mark.parametrize("spelling", [*NVFP4, "modelopt-fp8-tensor", "compressed-fp8-row", "hf-fp8-block"])
@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_one_part_of_three_without_its_scale_is_refused_naming_the_part(
    tmp_path: Path, spelling: str, part: str
) -> None:
    config, found = tiny_config("llama"), SPELLINGS[spelling]
    tensors = plain_tensors(config)
    names = [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"]
    stored = quantised(tensors, {n: found.stored(n, tensors[f"{n}.weight"]) for n in names})
    missing = f"model.layers.0.self_attn.{part}"
    del stored[f"{missing}.{list(found.encode(WEIGHT))[-1]}"]
    others = [n.removesuffix(".weight") for n in tensors if n.removesuffix(".weight") not in names]
    folder = write_model(tmp_path, config, stored, quantization=found.declaration(names, others))
    with pytest.raises(ClaimError, match=missing) as caught:
        load(folder)
    assert "docs/conventions.md" in str(caught.value)


DAMAGE = [
    (spelling, suffix)
    for spelling, suffix in SCALES
    if not (SPELLINGS[spelling].scheme == "nvfp4" and suffix == "weight_scale")
]
INPUTS = [
    *((spelling, suffix) for spelling, (suffix, _) in INPUT.items()),
    ("modelopt-fp8-tensor", "input_scale"),
    ("compressed-fp8-tensor", "input_scale"),
    ("hf-fp8-tensor", "activation_scale"),
]


@pytest.mark.fault("B07")
@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, -1.0])
@pytest.mark.parametrize(("spelling", "suffix"), [*DAMAGE, *INPUTS])
def test_a_scale_that_is_not_finite_and_positive_is_refused_with_its_value(
    tmp_path: Path, spelling: str, suffix: str, value: float
) -> None:
    tensors = SPELLINGS[spelling].encode(WEIGHT)
    damaged = tensors.get(suffix, torch.tensor([1.0])).clone()
    damaged.view(-1)[-1] = value
    tensors[suffix] = damaged
    checkpoint = write_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    with pytest.raises(WeightValueError) as caught:
        checkpoint.read(NAME)
    message = str(caught.value)
    assert f"{NAME}.{suffix}" in message
    assert repr(value) in message
    assert "finite values" in message or "a zero scale over zero codes only" in message


@pytest.mark.fault("B07")
@pytest.mark.parametrize("value", [math.inf, 0.0])
@pytest.mark.parametrize("spelling", NVFP4)
def test_a_dead_experts_input_scale_is_refused_at_load_whatever_the_activations(
    tmp_path: Path, spelling: str, value: float
) -> None:
    tensors = expert_model(spelling)
    name = f"model.layers.1.mlp.experts.3.up_proj.{INPUT[spelling][0]}"
    tensors[name] = torch.tensor([value])
    folder = write_model(tmp_path, MOE, tensors, quantization=w4a4(spelling))
    for activations in (None, "declared", "fp4"):
        with pytest.raises(WeightValueError, match=name):
            load(folder, activations=activations)


@pytest.mark.fault("B07")
@pytest.mark.parametrize("spelling", NVFP4)
@pytest.mark.parametrize(("byte", "shown"), [(0x7F, "nan"), (0xB8, "-1.0"), (0x00, "0.0")])
def test_a_damaged_block_scale_is_refused_with_its_place(
    tmp_path: Path, spelling: str, byte: int, shown: str
) -> None:
    tensors = SPELLINGS[spelling].encode(WEIGHT)
    tensors["weight_scale"].view(torch.uint8)[5, 2] = byte
    checkpoint = write_module(tmp_path, tensors, SPELLINGS[spelling].declaration([NAME]))
    with pytest.raises(WeightValueError) as caught:
        checkpoint.read(NAME)
    assert f"{NAME}.weight_scale" in str(caught.value)
    assert f"{shown} at [5, 2]" in str(caught.value)


BLOCKS: dict[str, dict[str, Any] | None] = {
    "undeclared": None,
    "modelopt": SPELLINGS["modelopt-fp8-block"].declaration([NAME]),
    "compressed-tensors": SPELLINGS["compressed-fp8-block"].declaration([NAME]),
    "hf-fp8": SPELLINGS["hf-fp8-block"].declaration([NAME]),
}


@pytest.mark.fault("B16")
@pytest.mark.parametrize("declared", BLOCKS)
@pytest.mark.parametrize("sibling", ["scale", "scales", "weight_scale_new", None])
def test_an_fp8_weight_without_a_known_scale_is_never_cast_raw(
    tmp_path: Path, declared: str, sibling: str | None
) -> None:
    tensors = SPELLINGS["hf-fp8-block"].encode(WEIGHT)
    scale = tensors.pop("weight_scale_inv")
    if sibling is not None:
        tensors[sibling] = scale
    checkpoint = write_module(tmp_path, tensors, BLOCKS[declared])
    for refused in (checkpoint.check, lambda: checkpoint.read(NAME)):
        with pytest.raises(VtensorsError) as caught:
            refused()
        message = str(caught.value)
        assert "F8_E4M3 [32, 64]" in message
        assert all(name in message for name in ("weight_scale", "weight_scale_inv", sibling or ""))
    assert checkpoint.unclaimed == tuple(f"{NAME}.{suffix}" for suffix in tensors)


@pytest.mark.fault("B16")
def test_a_model_with_one_unscaled_fp8_weight_does_not_load(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = plain_tensors(config)
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(VtensorsError, match=NAME):
        load(write_model(tmp_path, config, tensors))
