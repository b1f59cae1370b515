"""Recipes: which modules they name, and what is refused in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conversion.stored import modelopt_nvfp4, plain_bf16, run
from vtensors import RequestError, open_checkpoint
from vtensors_plugins.quantization.recipes import BUILTIN, load_recipe

LEFT_ALONE = (
    "model.embed_tokens",
    "lm_head",
    "model.layers.0.linear_attn.in_proj_a",
    "model.layers.0.linear_attn.in_proj_b",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.shared_expert_gate",
    "model.visual.blocks.0.attn.qkv",
    "mtp.fc",
    "mtp.layers.0.mlp.up_proj",
)
ATTENTION = ("model.layers.0.self_attn.q_proj", "model.layers.1.linear_attn.in_proj_qkv")
MLP = ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.experts.3.down_proj")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return plain_bf16(tmp_path / "source", dict.fromkeys((*LEFT_ALONE, *ATTENTION, *MLP), (16, 32)))


def _schemes(source: Path, out: Path, recipe: str, capsys: Any, *words: str) -> dict[str, str]:
    status, report = run(capsys, "quantize", source, out, "--recipe", recipe, *words)
    assert status == 0, report
    return {name: module.scheme for name, module in open_checkpoint(out).modules.items()}


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "nvfp4-mlp-fp8-attention"])
def test_a_uniform_recipe_quantizes_the_linear_layers_and_nothing_else(
    name: str, source: Path, tmp_path: Path, capsys: Any
) -> None:
    found = _schemes(source, tmp_path / "out", name, capsys)
    assert found == {**dict.fromkeys(LEFT_ALONE, "bf16"), **dict.fromkeys((*ATTENTION, *MLP), name)}


def test_the_mixed_recipe_is_the_published_layout(source: Path, tmp_path: Path, capsys: Any) -> None:
    found = _schemes(source, tmp_path / "out", "nvfp4-mlp-fp8-attention", capsys)
    assert {name for name, scheme in found.items() if scheme == "nvfp4"} == {*MLP, "lm_head"}
    assert {name for name, scheme in found.items() if scheme == "fp8-tensor"} == set(ATTENTION)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["quant_algo"] == "MIXED_PRECISION"
    assert block["quantized_layers"]["lm_head"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert "model.layers.1.mlp.experts" in block["quantized_layers"]


@pytest.mark.parametrize("target", ["compressed-tensors", "modelopt"])
def test_the_first_rule_that_names_a_module_decides(
    target: str, source: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "mine.json"
    rules = [
        {"targets": ["model.layers.0.mlp.gate_proj"], "scheme": "nvfp4", "mse": True},
        {"targets": ["re:.*mlp", "re:.*self_attn"], "scheme": "fp8-row"},
    ]
    path.write_text(json.dumps({"rules": rules, "ignore": ["re:.*mtp", "re:.*gate$"]}))
    found = _schemes(source, tmp_path / "out", str(path), capsys, "--to", target)
    assert {n for n, s in found.items() if s == "nvfp4"} == {"model.layers.0.mlp.gate_proj"}
    assert {n for n, s in found.items() if s == "fp8-row"} == {MLP[1], ATTENTION[0]} | {
        "model.layers.0.mlp.shared_expert_gate"
    } - {"model.layers.0.mlp.shared_expert_gate"}
    assert open_checkpoint(tmp_path / "out").conflicts == ()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("[]", "no rules"),
        ("{}", "no rules"),
        ("[1]", "not an object"),
        ('[{"targets": "all", "scheme": "nvfp4"}]', "targets is not a list"),
        ('[{"targets": ["a"]}]', "needs targets and a scheme"),
        ('[{"targets": ["a"], "scheme": "nvfp4", "mse": 1}]', "mse is not true or false"),
        ('[{"targets": ["a"], "scheme": "nvfp4", "bits": 4}]', "unknown key 'bits'"),
        ('{"rules": [{"targets": ["a"], "scheme": "x"}], "ignored": []}', "unknown key 'ignored'"),
        ("nonsense", "not"),
        ('[{"targets": ["a"], "targets": ["b"], "scheme": "x"}]', "twice"),
    ],
)
def test_a_recipe_file_that_is_wrong_is_refused(text: str, seen: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=seen):
        load_recipe(str(path))


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(RequestError) as caught:
        load_recipe("nvfp5")
    assert all(name in str(caught.value.accepted) for name in BUILTIN)


def test_a_recipe_that_names_nothing_is_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.json"
    path.write_text('[{"targets": ["model.layers.9.up_proj"], "scheme": "nvfp4"}]')
    status, report = run(capsys, "quantize", source, tmp_path / "out", "--recipe", path)
    assert status == 2
    assert "names no linear layer" in report["error"]["message"]


def test_entries_and_options_that_touch_nothing_are_said(source: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "mine.json"
    rules = [{"targets": ["model.layers.77.mlp", "Linear"], "scheme": "fp8-row"}]
    path.write_text(json.dumps({"rules": rules, "ignore": ["re:.*lm_haed", "re:.*mtp"]}))
    status, report = run(capsys, "quantize", source, tmp_path / "out", "--recipe", path, "--mse")
    assert status == 0
    assert report["warnings"] == [
        "recipe mine: 'model.layers.77.mlp' matches no module",
        "recipe mine: 're:.*lm_haed' matches no module",
        "--mse changes nothing: no module becomes nvfp4",
    ]


def test_a_scheme_that_the_target_cannot_hold_is_refused_with_advice_for_this_command(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    status, report = run(
        capsys, "quantize", source, tmp_path / "out", "--recipe", "fp8-row", "--to", "hf-fp8"
    )
    assert status == 2
    assert report["error"]["accepted"] == "fp8-block, fp8-tensor"
    assert report["error"]["fix"] == "choose another scheme in the recipe, or another convention (--to)"


def test_an_unknown_scheme_is_refused_with_the_known_ones(source: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.json"
    path.write_text('[{"targets": ["Linear"], "scheme": "int3"}]')
    status, report = run(capsys, "quantize", source, tmp_path / "out", "--recipe", path)
    assert status == 2
    assert "nvfp4" in report["error"]["accepted"]


def test_what_is_quantized_already_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    source = modelopt_nvfp4(tmp_path / "source")
    status, report = run(capsys, "quantize", source, tmp_path / "out", "--recipe", "fp8-row")
    assert status == 2
    assert report["error"]["tensor"] == "model.layers.0.mlp.gate_proj"


def test_fp8_per_tensor_for_modelopt_says_that_no_input_scale_is_there(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    _, report = run(capsys, "quantize", source, tmp_path / "out", "--recipe", "fp8-tensor")
    assert any("input_scale" in text for text in report["warnings"])


def test_the_recipe_on_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    (tmp_path / "page.json").write_text(page.split("```json\n")[1].split("```")[0])
    recipe = load_recipe(str(tmp_path / "page.json"))
    assert [rule.scheme for rule in recipe.rules] == ["fp8-row", "nvfp4", "fp8-block"]
    assert recipe.entries()
