"""Which activation precision runs, is shown, and is warned of; and that rows do not see their batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import NVFP4, SPELLINGS, compressed
from tiny_models import IDS, load, logits, plain_tensors, quantised, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config
from vtensors.inspection import inspection

CONFIG = tiny_config("llama")
TENSORS = plain_tensors(CONFIG)
MODULES = [name.removesuffix(".weight") for name in TENSORS if ".mlp." in name]
FOUR_BIT = {"type": "float", "num_bits": 4, "dynamic": "local", "strategy": "tensor_group", "group_size": 16}
INPUT = {"modelopt-nvfp4": ("input_scale", 1 / 512), "compressed-nvfp4": ("input_global_scale", 512.0)}


def block(spelling: str, *, four_bit: bool) -> dict[str, Any]:
    """The declaration of the MLPs as NVFP4, with 4-bit or 16-bit activations."""
    if spelling == "modelopt-nvfp4":
        word = "NVFP4" if four_bit else "W4A16_NVFP4"
        return {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {name: {"quant_algo": word, "group_size": 16} for name in MODULES},
        }
    own = {**SPELLINGS[spelling].group, "input_activations": FOUR_BIT if four_bit else None}
    return compressed(group_0={"targets": MODULES, **own})


def write(folder: Path, spelling: str, *, four_bit: bool, scaled: bool) -> Path:
    """The tiny model with NVFP4 MLPs. scaled: whether each has an input scale."""
    own: dict[str, dict[str, Tensor]] = {}
    suffix, value = INPUT[spelling]
    for name in MODULES:
        own[name] = SPELLINGS[spelling].stored(name, TENSORS[f"{name}.weight"])
        if scaled:
            own[name][f"{name}.{suffix}"] = torch.tensor([value])
    return write_model(
        folder, CONFIG, quantised(TENSORS, own), quantization=block(spelling, four_bit=four_bit)
    )


def mlp_row(folder: Path, activations: str | None) -> dict[str, Any]:
    """The row of the MLPs in the inspection."""
    report = inspection(vtensors.open_checkpoint(folder), activations)
    (row,) = [row for row in report["schemes"] if row["scheme"] == "nvfp4"]
    return dict(row)


@pytest.mark.fault("B32")
@pytest.mark.parametrize("spelling", NVFP4)
def test_the_input_scales_of_a_weight_only_declaration_are_listed_and_not_used(
    tmp_path: Path, spelling: str
) -> None:
    folder = write(tmp_path / "scaled", spelling, four_bit=False, scaled=True)
    bare = write(tmp_path / "bare", spelling, four_bit=False, scaled=False)
    for activations in (None, "16bit", "declared"):
        assert torch.equal(load(folder, activations=activations).logits(IDS), logits(bare))
        row = mlp_row(folder, activations)
        assert (row["declared"], row["executed"], row["modules"]) == ("16bit", "16bit", len(MODULES))
    waived = vtensors.open_checkpoint(folder).accounting.waived
    ((reason, names),) = waived.items()
    assert "input scale of a weight-only module" in reason
    assert set(names) == {f"{name}.{INPUT[spelling][0]}" for name in MODULES}


@pytest.mark.fault("B32")
@pytest.mark.parametrize("spelling", NVFP4)
def test_four_bit_activations_on_a_weight_only_declaration_run_only_when_asked_and_are_warned_of(
    tmp_path: Path, spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, spelling, four_bit=False, scaled=True)
    model = load(folder, activations="fp4")
    (told,) = [r.getMessage() for r in caplog.records if "weight-only (W4A16) is declared" in r.getMessage()]
    assert f"{len(MODULES)} modules" in told
    assert not torch.equal(model.logits(IDS), logits(folder))
    assert mlp_row(folder, "fp4")["executed"] == "fp4"


@pytest.mark.fault("B32")
@pytest.mark.parametrize("spelling", NVFP4)
def test_declared_four_bit_activations_without_input_scales_run_weight_only_and_are_warned_of(
    tmp_path: Path, spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, spelling, four_bit=True, scaled=False)
    weight_only = logits(folder)
    assert not caplog.records
    assert torch.equal(load(folder, activations="declared").logits(IDS), weight_only)
    (told,) = [r.getMessage() for r in caplog.records if "there is no input_scale" in r.getMessage()]
    assert f"({len(MODULES)} modules, first: model.layers.0.mlp." in told
    row = mlp_row(folder, "declared")
    assert (row["declared"], row["executed"]) == ("fp4", "16bit")


@pytest.mark.fault("B32")
@pytest.mark.parametrize("spelling", NVFP4)
def test_declared_four_bit_activations_run_when_declared_is_asked_for_and_only_then(
    tmp_path: Path, spelling: str
) -> None:
    folder = write(tmp_path, spelling, four_bit=True, scaled=True)
    for activations, executed in ((None, "16bit"), ("16bit", "16bit"), ("declared", "fp4"), ("fp4", "fp4")):
        row = mlp_row(folder, activations)
        assert (row["declared"], row["executed"]) == ("fp4", executed)
    sixteen = logits(folder)
    assert torch.equal(load(folder, activations="16bit").logits(IDS), sixteen)
    four = load(folder, activations="declared").logits(IDS)
    assert not torch.equal(four, sixteen)
    assert torch.equal(four, load(folder, activations="fp4").logits(IDS))


@pytest.mark.fault("B31")
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_a_rows_logits_on_the_cpu_are_the_same_alone_and_in_a_batch_of_eight(
    tmp_path: Path, family: str
) -> None:
    config = tiny_config(family)
    model = load(write_model(tmp_path, config, plain_tensors(config)))
    alone = model.logits(IDS)
    assert torch.equal(model.logits(IDS.repeat(8, 1)), alone.repeat(8, 1, 1))
    mixed = torch.cat([IDS.flip(1), IDS, IDS.roll(1, 1)])
    assert torch.equal(model.logits(mixed)[1:2], alone)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_a_prompt_gives_the_same_token_whole_and_token_by_token(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    model = load(write_model(tmp_path, config, plain_tensors(config)))
    state, whole = model.new_state(), model.step(IDS[0], model.new_state())
    for token in IDS[0]:
        last = model.step(token.reshape(1), state)
    assert torch.allclose(last, whole, atol=1e-5)
    assert int(last.argmax()) == int(whole.argmax())
