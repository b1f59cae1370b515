"""Ignore, exclude and target lists: matched on checkpoint names, by one matcher, and never above the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from declared_models import CONFIG, CONVENTIONS, TENSORS, every_linear, opened, write
from fault_builders import SPELLINGS, compressed
from tiny_models import load, logits, plain_tensors

from vtensors.errors import ConflictError
from vtensors.inspection import inspection

LINEARS = [name.removesuffix(".weight") for name in TENSORS if "_proj" in name]
ATTENTION = [name for name in LINEARS if "self_attn" in name]
DOWN = "model.layers.0.mlp.down_proj"
VISION = "model.visual.blocks.0.mlp.linear_fc1"


@pytest.mark.fault("B44")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_regular_expression_is_one_in_every_convention(tmp_path: Path, convention: str) -> None:
    block = every_linear(convention, ["re:.*self_attn.*", "re:vision_tower.*", "lm_head"])
    vision = {"vision_tower.blocks.0.fc.weight": torch.ones(16, 16, dtype=torch.bfloat16)}
    checkpoint = opened(write(tmp_path, convention, block, plain=ATTENTION, extra=vision))
    assert checkpoint.conflicts == ()
    assert not [warning for warning in checkpoint.warnings if "no module: " in warning]
    for name in [*ATTENTION, "vision_tower.blocks.0.fc"]:
        module = checkpoint.modules[name]
        assert module.scheme == "bf16"
        assert module.declared_scheme is not None
        assert module.declared_scheme.weight == "unquantized"
    assert checkpoint.modules[DOWN].scheme == CONVENTIONS[convention].scheme


@pytest.mark.fault("B44")
def test_a_regular_expression_is_anchored_at_the_start_only(tmp_path: Path) -> None:
    block = every_linear("compressed-tensors", ["re:self_attn.*", "lm_head"])
    checkpoint = opened(write(tmp_path, "compressed-tensors", block, plain=ATTENTION))
    assert any("self_attn" in conflict.where for conflict in checkpoint.conflicts)


@pytest.mark.fault("B45")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_entries_are_matched_on_the_names_of_the_checkpoint(tmp_path: Path, convention: str) -> None:
    block = every_linear(convention, [VISION, "lm_head"])
    extra = {f"{VISION}.weight": torch.ones(16, 16, dtype=torch.bfloat16)}
    checkpoint = opened(write(tmp_path, convention, block, extra=extra))
    assert checkpoint.conflicts == ()
    assert checkpoint.modules[VISION].scheme == "bf16"
    assert checkpoint.accounting.waived_modules[VISION] == "vision tower: text path only"


@pytest.mark.fault("B45")
@pytest.mark.parametrize("stored", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("listed", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_entries_of_another_prefix_dialect_speak_of_the_same_module(
    tmp_path: Path, convention: str, stored: str, listed: str
) -> None:
    name = "layers.1.self_attn.o_proj"
    block = every_linear(convention, [listed + name, "lm_head"])
    tensors = plain_tensors(CONFIG, prefix=stored)
    checkpoint = opened(write(tmp_path, convention, block, plain=[stored + name], tensors=tensors))
    assert checkpoint.conflicts == ()
    assert not [warning for warning in checkpoint.warnings if "no module: " in warning]
    assert checkpoint.modules[stored + name].scheme == "bf16"


@pytest.mark.fault("B46")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_an_ignored_fused_projection_of_the_vision_tower_stays_plain(tmp_path: Path, convention: str) -> None:
    name = "model.visual.blocks.0.attn.qkv"
    extra = {f"{name}.weight": torch.ones(48, 16, dtype=torch.bfloat16)}
    block = every_linear(convention, [name, "lm_head"])
    checkpoint = opened(write(tmp_path, convention, block, extra=extra))
    assert checkpoint.modules[name].scheme == "bf16"
    assert checkpoint.conflicts == ()


@pytest.mark.fault("B46")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_an_entry_for_the_fused_name_leaves_its_parts_plain(tmp_path: Path, convention: str) -> None:
    parts = [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"]
    block = every_linear(convention, ["model.layers.0.self_attn.qkv_proj", "lm_head"])
    folder = write(tmp_path / "q", convention, block, plain=parts)
    checkpoint = opened(folder)
    assert {checkpoint.modules[name].scheme for name in parts} == {"bf16"}
    # Tensors decide, so that nothing is lost where a convention's rule does not know the fused name.
    named = write(tmp_path / "n", convention, every_linear(convention, [*parts, "lm_head"]), plain=parts)
    assert torch.equal(logits(folder), logits(named))


@pytest.mark.fault("B47")
def test_the_ignore_list_of_config_json_is_followed_and_not_the_recipes(tmp_path: Path) -> None:
    block = every_linear("compressed-tensors", ["model.layers.0.mlp.down_proj", "lm_head"])
    folder = write(tmp_path, "compressed-tensors", block, plain=[DOWN])
    before = inspection(opened(folder))
    recipe = "default_stage:\n  default_modifiers:\n    QuantizationModifier:\n      ignore: ['re:.*gate']\n"
    (folder / "recipe.yaml").write_text(recipe)
    checkpoint = opened(folder)
    assert checkpoint.conflicts == ()
    assert checkpoint.modules[DOWN].scheme == "bf16"
    assert checkpoint.modules["model.layers.0.mlp.gate_proj"].scheme == "nvfp4"
    assert inspection(checkpoint)["schemes"] == before["schemes"]


@pytest.mark.fault("B48")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_an_ignored_module_that_is_packed_all_the_same_is_read_as_packed_and_warned_of(
    tmp_path: Path, convention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "q", convention, every_linear(convention, [DOWN, "lm_head"]))
    checkpoint = opened(folder)
    module = checkpoint.modules[DOWN]
    assert (module.scheme, module.convention) == (CONVENTIONS[convention].scheme, convention)
    (conflict,) = checkpoint.conflicts
    assert conflict.where == DOWN
    assert "unquantized" in conflict.says
    assert module.scheme in conflict.instead
    assert conflict.chosen == "the tensors of the file"
    intact = write(tmp_path / "i", convention, every_linear(convention, ["lm_head"]))
    assert torch.equal(logits(folder), logits(intact))
    monkeypatch.setenv("VT_STRICT", "conflicts")
    with pytest.raises(ConflictError, match=DOWN) as caught:
        load(folder)
    assert "unquantized" in str(caught.value)
    assert module.scheme in str(caught.value)


STALE = {
    "modelopt": ("visual*", "model.visual"),
    "compressed-tensors": ("re:visual.*", "model.visual"),
    "hf-fp8": ("model.visul", "model.visual"),
}


@pytest.mark.fault("B49")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_an_entry_that_matches_no_module_is_told_with_the_nearest_name(
    tmp_path: Path, convention: str
) -> None:
    entry, near = STALE[convention]
    extra = {f"{VISION}.weight": torch.ones(16, 16, dtype=torch.bfloat16)}
    block = every_linear(convention, [entry, "lm_head"])
    checkpoint = opened(write(tmp_path, convention, block, extra=extra))
    (told,) = [warning for warning in checkpoint.warnings if "no module: " in warning]
    assert f"1 entry matches no module: {entry!r}" in told
    assert "the nearest name is '" in told
    assert near in told
    assert told in inspection(checkpoint)["warnings"]


@pytest.mark.fault("B49")
def test_a_target_that_matches_no_module_is_told_too(tmp_path: Path) -> None:
    spelling = SPELLINGS["compressed-nvfp4"]
    block = compressed(group_0={"targets": [*LINEARS, r"re:.*mlp\.dwon_proj"], **spelling.group})
    checkpoint = opened(write(tmp_path, "compressed-tensors", block))
    (told,) = [warning for warning in checkpoint.warnings if "no module: " in warning]
    assert "config_groups.group_0.targets" in told
    assert "dwon_proj" in told
