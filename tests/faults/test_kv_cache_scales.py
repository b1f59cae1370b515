"""The scales of an FP8 KV cache: found under every accepted name, used, and never dropped in silence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import IDS, load, plain_tensors, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config
from vtensors.errors import ClaimError, VtensorsError

CONFIG = tiny_config("llama")
TENSORS = plain_tensors(CONFIG)
# Below `<layer>.self_attn.`; the publishers' own names first.
NAMINGS = {
    "projections": ("k_proj.k_scale", "v_proj.v_scale"),
    "attention": ("k_scale", "v_scale"),
    "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "cache-module": ("attn.k_scale", "attn.v_scale"),
    "outputs": ("k_proj.output_scale", "v_proj.output_scale"),
}
MODELOPT_KV = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*"]}
DECLARED = {
    "modelopt": {**MODELOPT_KV, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
    "modelopt-name": {**MODELOPT_KV, "kv_cache_quant_algo": "FP8"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"},
                "input_activations": None,
            }
        },
        "ignore": ["re:.*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor"},
    },
}


def scales(
    naming: str, k: float = 0.05, v: float = 0.08, *, shape: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """k and v of both layers under that naming."""
    k_name, v_name = NAMINGS[naming]
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.full(shape, value)
        for layer in range(2)
        for name, value in ((k_name, k), (v_name, v))
    }


def write(folder: Path, extra: Mapping[str, Tensor], block: Mapping[str, Any] | None = None) -> Path:
    """The tiny model beside these tensors."""
    return write_model(folder, CONFIG, {**TENSORS, **extra}, quantization=block or DECLARED["modelopt"])


@pytest.mark.fault("B22")
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("naming", NAMINGS)
def test_kv_scales_are_used_under_every_accepted_name(
    tmp_path: Path, naming: str, declared: str, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "named", scales(naming, shape=shape), DECLARED[declared])
    with caplog.at_level(logging.WARNING, "vtensors"):
        model = load(folder, kv_cache_dtype="fp8")
    assert not [r for r in caplog.records if "scale" in r.getMessage()]
    found = model.checkpoint.kv_scales()
    assert {owner.rpartition(".")[0] for owner in found} == {"model.layers.0", "model.layers.1"}
    for scale in found.values():
        assert (scale.k, scale.v) == pytest.approx((0.05, 0.08))
    for layer in model._model.layers:
        assert layer.mixer.kv_scales == pytest.approx((0.05, 0.08))
    assert model.checkpoint.kv_cache is not None
    assert model.checkpoint.kv_cache.algorithm == "FP8"


@pytest.mark.fault("B22")
def test_the_scales_change_what_the_cache_gives_back(tmp_path: Path) -> None:
    # 448 * 0.001 clips most keys: scales that were dropped would show.
    small = load(write(tmp_path / "a", scales("attention", 0.001, 0.001)), kv_cache_dtype="fp8").logits(IDS)
    one = load(write(tmp_path / "b", scales("attention", 1.0, 1.0)), kv_cache_dtype="fp8").logits(IDS)
    exact = load(write(tmp_path / "c", scales("attention", 0.001, 0.001))).logits(IDS)
    assert not torch.allclose(small, one, atol=0.05)
    assert torch.allclose(one, exact, atol=0.2)


@pytest.mark.fault("B22")
def test_one_kv_scale_serves_both(tmp_path: Path) -> None:
    extra = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.05) for layer in range(2)}
    model = load(write(tmp_path, extra), kv_cache_dtype="fp8")
    assert all(layer.mixer.kv_scales == pytest.approx((0.05, 0.05)) for layer in model._model.layers)


@pytest.mark.fault("B22")
@pytest.mark.parametrize("declared", DECLARED)
def test_a_declared_fp8_cache_without_scales_is_one_clear_line(
    tmp_path: Path, declared: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vtensors"):
        load(write(tmp_path, {}, DECLARED[declared]), kv_cache_dtype="fp8")
    (told,) = [r.getMessage() for r in caplog.records if "k_scale" in r.getMessage()]
    assert "2 layers have no k_scale / v_scale; 1.0 is used" in told


@pytest.mark.fault("B22")
def test_scales_that_a_16_bit_cache_does_not_use_are_listed(tmp_path: Path) -> None:
    extra = scales("projections")
    checkpoint = vtensors.open_checkpoint(write(tmp_path, extra))
    checkpoint.check()
    (names,) = [names for reason, names in checkpoint.accounting.waived.items() if "KV-cache" in reason]
    assert set(names) == set(extra)


@pytest.mark.fault("B22")
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.7.self_attn.k_scale",
        "model.layers.0.mlp.down_proj.k_scale",
        "model.layers.0.attention.k_scale",
        "layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.k_proj.kv_cache_scale",
    ],
)
def test_a_scale_that_belongs_to_no_attention_of_the_model_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {**scales("projections"), name: torch.tensor(0.05)})
    for options in ({}, {"kv_cache_dtype": "fp8"}):
        with pytest.raises(VtensorsError, match=name.rpartition(".")[0]):
            load(folder, **options)


@pytest.mark.fault("B22")
@pytest.mark.parametrize("second", [naming for naming in NAMINGS if naming != "projections"])
def test_one_scale_under_two_names_is_refused(tmp_path: Path, second: str) -> None:
    folder = write(tmp_path, {**scales("projections"), **scales(second, 0.5, 0.5)})
    with pytest.raises(ClaimError, match=r"model\.layers\.0\.self_attn"):
        load(folder)


@pytest.mark.fault("B23")
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(("present", "value"), [("k", 0.05), ("v", 0.08)])
def test_a_lone_scale_serves_both_and_is_noted(
    tmp_path: Path, naming: str, present: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    k_name, v_name = NAMINGS[naming]
    dropped = v_name if present == "k" else k_name
    extra = {name: tensor for name, tensor in scales(naming).items() if not name.endswith(dropped)}
    with caplog.at_level(logging.WARNING, "vtensors"):
        model = load(write(tmp_path, extra), kv_cache_dtype="fp8")
    assert all(layer.mixer.kv_scales == pytest.approx((value, value)) for layer in model._model.layers)
    notes = [r.getMessage() for r in caplog.records if f"only {present}_scale is present" in r.getMessage()]
    assert len(notes) == 2
    assert all("used for both" in note and "self_attn" in note for note in notes)
