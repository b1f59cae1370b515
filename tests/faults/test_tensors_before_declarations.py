"""Declared and found disagree: the tensors decide, the disagreement is reported, nothing is forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from declared_models import CONVENTIONS, every_linear, opened, write
from fault_builders import SPELLINGS, by_formula
from tiny_models import IDS, load, logits, plain_tensors, quantised, write_model
from torch import Tensor

from tiny_decoders import tiny_config

QWEN = tiny_config("qwen3_5")
MOE = tiny_config("qwen3_5_moe", num_experts=4)
TENSORS = plain_tensors(QWEN)
PLAIN = ["model.layers.0.linear_attn.in_proj_b", "model.layers.0.linear_attn.in_proj_a"]
BF16 = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
# A list that leaves out part of the draft head, as each writer spells it.
PARTIAL = {"modelopt": "mtp.layers.0*", "compressed-tensors": "re:mtp.layers.0.*", "hf-fp8": "mtp.layers.0"}
DRAFT = "mtp.layers.0.mlp.up_proj"


def qwen(folder: Path, convention: str, extra: dict[str, Tensor]) -> Path:
    """Tiny Qwen3.5, all `_proj` linears quantised, an ignore list that names mtp.layers.0 alone."""
    block = every_linear(convention, [PARTIAL[convention], "lm_head"])
    return write(folder, convention, block, extra=extra, config=QWEN, tensors=TENSORS, plain=PLAIN)


@pytest.mark.fault("B40")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_an_unquantised_draft_head_outside_of_the_exclude_list_is_read_as_it_is(
    tmp_path: Path, convention: str
) -> None:
    extra = {"mtp.fc.weight": BF16, f"{DRAFT}.weight": BF16.clone()}
    checkpoint = opened(qwen(tmp_path, convention, extra))
    read: Any = checkpoint.read("mtp.fc")
    assert checkpoint.modules["mtp.fc"].scheme == "bf16"
    assert torch.equal(read.dequantize(torch.bfloat16), BF16)
    (conflict,) = [c for c in checkpoint.conflicts if c.where == "mtp.fc"]
    declared = {"modelopt": "W4A16_NVFP4", "compressed-tensors": "nvfp4-pack-quantized", "hf-fp8": "fp8"}
    assert declared[convention] in conflict.says
    assert "bf16 (weight BF16)" in conflict.instead
    assert not any(DRAFT in c.where for c in checkpoint.conflicts)
    load(tmp_path)


@pytest.mark.fault("B41")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_quantised_draft_head_is_read_as_quantised(tmp_path: Path, convention: str) -> None:
    spelling = CONVENTIONS[convention]
    stored = spelling.encode(BF16)
    extra = {f"{name}.{suffix}": t.clone() for name in ("mtp.fc", DRAFT) for suffix, t in stored.items()}
    checkpoint = opened(qwen(tmp_path, convention, extra))
    for name in ("mtp.fc", DRAFT):
        read: Any = checkpoint.read(name)
        assert read.scheme == spelling.scheme
        assert torch.equal(read.dequantize(torch.float32), by_formula(stored))
    # Outside of the list it is as declared; inside, the disagreement is told.
    told = [conflict.where for conflict in checkpoint.conflicts if "mtp" in conflict.where]
    assert told == [DRAFT]
    load(tmp_path)


@pytest.mark.fault("B50")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_plain_router_outside_of_the_exclude_list_is_read_as_it_is(tmp_path: Path, convention: str) -> None:
    tensors = plain_tensors(MOE)
    folder = write(
        tmp_path,
        convention,
        every_linear(convention, ["lm_head"]),
        config=MOE,
        tensors=tensors,
        plain=PLAIN,
    )
    checkpoint = opened(folder)
    router = checkpoint.modules["model.layers.0.mlp.gate"]
    assert (router.scheme, router.shape) == ("bf16", (4, 32))
    (conflict,) = [c for c in checkpoint.conflicts if c.where.startswith("model.layers.*.mlp.gate ")]
    assert conflict.modules == 2
    assert conflict.chosen == "the tensors of the file"
    load(folder)


@pytest.mark.fault("B50")
@pytest.mark.parametrize("container", [True, False], ids=["experts-entry", "one-entry-each"])
def test_packed_experts_under_a_null_algorithm_are_detected_and_warned_of(
    tmp_path: Path, container: bool
) -> None:
    tensors, spelling = plain_tensors(MOE), SPELLINGS["modelopt-nvfp4"]
    experts = [name.removesuffix(".weight") for name in tensors if ".experts." in name]
    listed = experts if not container else [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    block = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {name: {"quant_algo": None} for name in listed},
    }
    own = {name: spelling.stored(name, tensors[f"{name}.weight"].float()) for name in experts}
    folder = write_model(tmp_path / "q", MOE, quantised(tensors, own), quantization=block)
    checkpoint = opened(folder)
    assert {checkpoint.modules[name].scheme for name in experts} == {"nvfp4"}
    assert sum(conflict.modules for conflict in checkpoint.conflicts) == len(experts)
    assert all("unquantized" in conflict.says for conflict in checkpoint.conflicts)
    assert all("quantized_layers has quant_algo null" in conflict.says for conflict in checkpoint.conflicts)
    right = spelling.declaration(experts)
    assert torch.equal(
        load(folder).logits(IDS),
        logits(write_model(tmp_path / "r", MOE, quantised(tensors, own), quantization=right)),
    )
