"""Experts stored one by one or stacked: every expert keeps its own scales, and an unknown layout never loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import SPELLINGS, by_formula, compressed
from tiny_models import IDS, load, logits, plain_tensors, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config
from vtensors.errors import VtensorsError

CONFIG = tiny_config("qwen3_5_moe", num_experts=2)
TENSORS = plain_tensors(CONFIG)
PLACE = "model.layers.{}.mlp.experts"
PARTS = ("gate_proj", "up_proj", "down_proj")
# Names of stacked tensors behind the projection's own: ModelOpt keeps the suffix whole, the others cut it.
SHORT = {"weight": "", "weight_packed": "_packed", "weight_scale": "_scale"}
SHORT |= {"weight_scale_inv": "_scale_inv", "weight_global_scale": "_global_scale"}
ANY_LINEAR = {
    "plain": None,
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*"]},
    "compressed-nvfp4": compressed(
        group_0={"targets": ["re:.*experts.*"], **SPELLINGS["compressed-nvfp4"].group}
    ),
    "compressed-fp8-row": compressed(
        group_0={"targets": ["re:.*experts.*"], **SPELLINGS["compressed-fp8-row"].group}
    ),
    "modelopt-fp8-row": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "hf-fp8-block": SPELLINGS["hf-fp8-block"].declaration([]),
}


def expert(layer: int, number: int, part: str) -> Tensor:
    """A matrix of the plain model, each expert and part of another size."""
    weight = TENSORS[f"{PLACE.format(layer)}.{number}.{part}.weight"].float()
    return weight * (1 + number) * (1.5 if part == "up_proj" else 1.0)


def encoded(spelling: str, layer: int, number: int, part: str) -> dict[str, Tensor]:
    """suffix -> tensor of one expert's matrix."""
    weight = expert(layer, number, part)
    return {"weight": weight} if spelling == "plain" else SPELLINGS[spelling].encode(weight)


def one_by_one(spelling: str, layer: int) -> dict[str, Tensor]:
    """Every expert's tensors under names of their own."""
    return {
        f"{PLACE.format(layer)}.{number}.{part}.{suffix}": tensor
        for number in range(2)
        for part in PARTS
        for suffix, tensor in encoded(spelling, layer, number, part).items()
    }


def stacked(spelling: str, layer: int) -> dict[str, Tensor]:
    """gate_up_proj and down_proj of all experts; gate and up share the scalar of an NVFP4 matrix."""
    found: dict[str, Tensor] = {}
    for name, parts in (("gate_up_proj", PARTS[:2]), ("down_proj", PARTS[2:])):
        rows = [torch.cat([expert(layer, number, part) for part in parts]) for number in range(2)]
        each = [{"weight": row} if spelling == "plain" else SPELLINGS[spelling].encode(row) for row in rows]
        for suffix in each[0]:
            whole = spelling.startswith("modelopt") and suffix != "weight"
            key = f"_{suffix}" if whole else SHORT[suffix]
            found[f"{PLACE.format(layer)}.{name}{key}"] = torch.stack([own[suffix] for own in each])
    return found


def values_of(folder: Path) -> dict[str, Tensor]:
    """Every expert's matrix as vtensors reads it."""
    checkpoint = vtensors.open_checkpoint(folder)
    names = [f"{PLACE.format(0)}.{number}.{part}" for number in range(2) for part in PARTS]
    read: dict[str, Any] = {name: checkpoint.read(name) for name in names}
    return {name: weight.dequantize(torch.float32) for name, weight in read.items()}


def model(folder: Path, experts: Mapping[str, Tensor], block: dict[str, Any] | None) -> Path:
    """The mixture with these experts' tensors in place of its own."""
    others = {name: tensor for name, tensor in TENSORS.items() if ".experts." not in name}
    return write_model(folder, CONFIG, {**others, **experts}, quantization=block)


@pytest.mark.fault("B26")
@pytest.mark.parametrize("layout", [one_by_one, stacked])
@pytest.mark.parametrize("spelling", ANY_LINEAR)
def test_experts_load_stacked_and_one_by_one_with_the_values_of_their_formula(
    tmp_path: Path, spelling: str, layout: Any
) -> None:
    experts = layout(spelling, 0) | layout(spelling, 1)
    folder = model(tmp_path / "m", experts, ANY_LINEAR[spelling])
    found = values_of(folder)
    for number in range(2):
        wide = torch.cat([expert(0, number, part) for part in PARTS[:2]])
        whole = wide if spelling == "plain" else by_formula(SPELLINGS[spelling].encode(wide))
        for place, part in enumerate(PARTS[:2]):
            alone = by_formula(encoded(spelling, 0, number, part)) if spelling != "plain" else None
            wanted = whole[16 * place : 16 * (place + 1)] if layout is stacked or alone is None else alone
            assert torch.equal(found[f"{PLACE.format(0)}.{number}.{part}"], wanted)
    plain = {f"{name}.weight": value for name, value in found.items()}
    plain |= one_by_one("plain", 1)
    if spelling == "plain":
        assert torch.equal(logits(folder), logits(model(tmp_path / "p", plain, None)))
    else:
        assert bool(torch.isfinite(logits(folder)).all())


UNKNOWN = {
    "gate_up_proj_blocks": (2, 32, 2, 16),
    "gate_up_proj_bias_packed": (2, 32, 16),
    "w13_weight": (2, 32, 32),
    "gate_up_proj_weight_extra": (2, 32, 32),
}


@pytest.mark.fault("B26")
@pytest.mark.parametrize("name", UNKNOWN)
def test_experts_of_an_unknown_layout_do_not_load(tmp_path: Path, name: str) -> None:
    experts = stacked("plain", 0) | stacked("plain", 1)
    del experts[f"{PLACE.format(0)}.gate_up_proj"]
    experts[f"{PLACE.format(0)}.{name}"] = torch.ones(UNKNOWN[name], dtype=torch.uint8)
    with pytest.raises(VtensorsError, match=rf"model\.layers\.0\.mlp\.experts\.{name}"):
        load(model(tmp_path, experts, None))


@pytest.mark.fault("B26")
@pytest.mark.parametrize("layout", [one_by_one, stacked])
@pytest.mark.parametrize("part", ["gate", "down"])
def test_a_missing_expert_tensor_is_refused_and_never_filled(tmp_path: Path, layout: Any, part: str) -> None:
    experts = layout("plain", 0) | layout("plain", 1)
    missing = next(name for name in reversed(experts) if part in name and "layers.1" in name)
    del experts[missing]
    with pytest.raises(VtensorsError, match=r"not in the checkpoint") as caught:
        load(model(tmp_path, experts, None))
    assert f"model.layers.1.mlp.experts.{'0' if layout is stacked else '1'}.{part}_proj" in str(caught.value)


@pytest.mark.fault("B06")
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_each_expert_keeps_its_own_global_scale(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ratio = {"modelopt-nvfp4": ("weight_scale_2", 2.0), "compressed-nvfp4": ("weight_global_scale", 0.5)}
    for spelling, (suffix, factor) in ratio.items():
        experts = {}
        for number in range(2):
            for part in PARTS:
                stored = SPELLINGS[spelling].encode(expert(0, 0, part))
                total = stored[suffix].reshape(shape)
                stored[suffix] = total * factor if number == 0 else total
                for own, tensor in stored.items():
                    experts[f"{PLACE.format(0)}.{number}.{part}.{own}"] = tensor
        block = ANY_LINEAR[spelling]
        found = values_of(model(tmp_path / spelling, experts | one_by_one(spelling, 1), block))
        for part in PARTS:
            first, second = (found[f"{PLACE.format(0)}.{number}.{part}"] for number in range(2))
            assert torch.equal(first, 2 * second)


@pytest.mark.fault("B06")
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("spelling", ["modelopt-nvfp4", "compressed-nvfp4"])
def test_each_stacked_expert_keeps_its_own_global_scale(
    tmp_path: Path, spelling: str, shape: tuple[int, ...]
) -> None:
    experts = stacked(spelling, 0) | stacked(spelling, 1)
    for name, tensor in experts.items():
        if name.endswith(("_scale_2", "_global_scale")):
            experts[name] = torch.tensor([4.0, 8.0]).reshape(shape)
        else:
            tensor[1] = tensor[0]
    folder = model(tmp_path, experts, ANY_LINEAR[spelling])
    if spelling == "modelopt-nvfp4" and len(shape) == 2:  # no writer of it gives two dimensions
        with pytest.raises(VtensorsError, match=r"weight_scale_2 F32 \[2, 1\]"):
            load(folder)
        return
    found = values_of(folder)
    for part in PARTS:
        first, second = (found[f"{PLACE.format(0)}.{number}.{part}"] for number in range(2))
        assert torch.equal(second, first * (0.5 if spelling == "compressed-nvfp4" else 2.0))


@pytest.mark.fault("B06")
@pytest.mark.parametrize("spelling", ["modelopt-nvfp4", "compressed-nvfp4", "compressed-fp8-row", "plain"])
def test_a_tensor_beside_the_experts_that_nobody_consumes_is_reported(tmp_path: Path, spelling: str) -> None:
    experts = stacked(spelling, 0) | stacked(spelling, 1)
    extra = f"{PLACE.format(0)}.down_proj_fourth_scale"
    folder = model(tmp_path, {**experts, extra: torch.ones(2)}, ANY_LINEAR[spelling])
    assert extra in vtensors.open_checkpoint(folder).unclaimed
    with pytest.raises(VtensorsError, match=extra):
        load(folder)


@pytest.mark.fault("B42")
@pytest.mark.parametrize("spelling", ["plain", "modelopt-nvfp4", "compressed-nvfp4"])
@pytest.mark.parametrize(("main", "draft"), [(stacked, one_by_one), (one_by_one, stacked)])
def test_the_layout_of_mtp_experts_is_their_own(tmp_path: Path, main: Any, draft: Any, spelling: str) -> None:
    own = {name.replace("model.layers.0", "mtp.layers.0"): t for name, t in draft(spelling, 0).items()}
    experts = main(spelling, 0) | main(spelling, 1)
    folder = model(tmp_path / "m", {**experts, **own}, ANY_LINEAR[spelling])
    assert torch.equal(load(folder).logits(IDS), logits(model(tmp_path / "n", experts, ANY_LINEAR[spelling])))
    checkpoint = vtensors.open_checkpoint(folder)
    for part in PARTS:
        draft_expert: Any = checkpoint.read(f"mtp.layers.0.mlp.experts.1.{part}")
        assert draft_expert.shape == tuple(expert(0, 1, part).shape)
    assert set(checkpoint.accounting.waived["multi-token prediction: not used"]) == set(own)
