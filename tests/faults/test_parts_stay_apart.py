"""Projections that other loaders fuse: each keeps its own scale, scheme and order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import NAME, NVFP4, SPELLINGS, by_formula, read_module, write_module
from tiny_models import IDS, load, logits, plain_tensors, quantised, write_model
from torch import Tensor

from tiny_decoders import tiny_config
from vtensors_kernels.reference.linear import linear
from vtensors_plugins.architectures.models.attention import split_gate

FUSED = {
    "qkv": ("llama", "model.layers.0.self_attn.", ("q_proj", "k_proj", "v_proj")),
    "gate-up": ("llama", "model.layers.0.mlp.", ("gate_proj", "up_proj")),
    "gated-qkv": ("qwen3_5", "model.layers.1.self_attn.", ("q_proj", "k_proj", "v_proj")),
    "qkv-z": ("qwen3_5", "model.layers.0.linear_attn.", ("in_proj_qkv", "in_proj_z")),
    "qkv-z-b-a": (
        "qwen3_5",
        "model.layers.0.linear_attn.",
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ),
    "shared-gate-up": ("qwen3_5_moe", "model.layers.0.mlp.shared_expert.", ("gate_proj", "up_proj")),
    "expert-gate-up": ("qwen3_5_moe", "model.layers.0.mlp.experts.2.", ("gate_proj", "up_proj")),
}


def equals_its_dequantised_copy(
    folder: Path, config: dict[str, Any], stored: Mapping[str, Mapping[str, Tensor]], block: dict[str, Any]
) -> None:
    """The model of quantised modules gives bit for bit what their values by formula give as plain floats.

    stored: module -> suffix -> tensor.
    """
    tensors = plain_tensors(config)
    full = {m: {f"{m}.{suffix}": t for suffix, t in own.items()} for m, own in stored.items()}
    values = {m: {f"{m}.weight": by_formula(own)} for m, own in stored.items()}
    found = load(write_model(folder / "q", config, quantised(tensors, full), quantization=block))
    assert found.checkpoint.conflicts == ()
    plain = logits(write_model(folder / "p", config, quantised(tensors, values)))
    assert torch.equal(found.logits(IDS), plain)
    assert not torch.equal(plain, logits(write_model(folder / "o", config, tensors)))


@pytest.mark.fault("B05")
@pytest.mark.parametrize("spelling", NVFP4)
def test_gate_and_up_with_global_scales_of_another_size_keep_their_own(tmp_path: Path, spelling: str) -> None:
    for number, part in ((256.0, "gate"), (384.0, "up")):
        tensors = SPELLINGS[spelling].encode(torch.ones(32, 64))
        codes = next(iter(tensors))
        tensors[codes] = torch.full_like(tensors[codes], 0x22)
        tensors["weight_scale"] = torch.ones(32, 4).to(torch.float8_e4m3fn)
        total = "weight_scale_2" if spelling == "modelopt-nvfp4" else "weight_global_scale"
        stored = 1 / number if total == "weight_scale_2" else number
        tensors[total] = torch.full_like(tensors[total], stored)
        values = read_module(tmp_path / part, tensors, SPELLINGS[spelling].declaration([NAME]))
        exact = torch.tensor(1.0) / torch.tensor(number)
        assert torch.equal(values, exact.expand(32, 64))


@pytest.mark.fault("B05")
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("parts", FUSED)
def test_parts_with_scales_of_another_size_equal_separate_matmuls(
    tmp_path: Path, parts: str, spelling: str
) -> None:
    family, prefix, names = FUSED[parts]
    config, found = tiny_config(family), SPELLINGS[spelling]
    tensors = plain_tensors(config)
    modules = [prefix + name for name in names]
    stored = {
        # Each part half again as large as the one before: so are its scales.
        module: found.encode(tensors[f"{module}.weight"].float() * 1.5**place)
        for place, module in enumerate(modules)
    }
    equals_its_dequantised_copy(tmp_path, config, stored, _declared(found, modules, tensors))


def _declared(spelling: Any, modules: list[str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    others = {name.removesuffix(".weight") for name in tensors} - set(modules)
    block: dict[str, Any] = spelling.declaration(modules, sorted(others))
    return block


@pytest.mark.fault("B18")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_quantised_qkv_and_z_stay_apart_from_unquantised_b_and_a(tmp_path: Path, spelling: str) -> None:
    config, found = tiny_config("qwen3_5"), SPELLINGS[spelling]
    tensors = plain_tensors(config)
    modules = [f"model.layers.0.linear_attn.in_proj_{part}" for part in ("qkv", "z")]
    stored = {module: found.encode(tensors[f"{module}.weight"]) for module in modules}
    equals_its_dequantised_copy(tmp_path, config, stored, _declared(found, modules, tensors))


@pytest.mark.fault("B46")
@pytest.mark.parametrize("plain", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_ignored_part_of_three_stays_plain_beside_two_quantised(
    tmp_path: Path, spelling: str, plain: str
) -> None:
    config, found = tiny_config("llama"), SPELLINGS[spelling]
    tensors = plain_tensors(config)
    place = "model.layers.0.self_attn."
    modules = [place + name for name in ("q_proj", "k_proj", "v_proj") if name != plain]
    stored = {module: found.encode(tensors[f"{module}.weight"]) for module in modules}
    equals_its_dequantised_copy(tmp_path, config, stored, _declared(found, modules, tensors))


@pytest.mark.fault("B21")
@pytest.mark.parametrize("spelling", ["plain", *SPELLINGS])
def test_query_and_gate_alternate_per_head_in_every_scheme(tmp_path: Path, spelling: str) -> None:
    # Two heads of four dimensions: row r of q_proj holds r + 1, or what the scheme makes of it.
    rows = torch.arange(1.0, 17.0).reshape(16, 1).expand(16, 32).contiguous()
    stored, block = {"weight": rows}, None
    if spelling != "plain":
        stored = SPELLINGS[spelling].encode(rows)
        block = SPELLINGS[spelling].declaration([NAME])
    weight: Any = write_module(tmp_path, stored, block).read(NAME)
    query, gate = split_gate(linear(torch.full((1, 32), 1 / 32), weight), 2, 4, gated=True)
    values = rows[:, 0] if spelling == "plain" else by_formula(stored)[:, 0]
    assert gate is not None
    assert torch.allclose(query[0], values.reshape(2, 2, 4)[:, 0])
    assert torch.allclose(gate[0], values.reshape(2, 2, 4)[:, 1])
    assert torch.allclose(values, rows[:, 0], rtol=0.1)
