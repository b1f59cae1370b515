"""`vtensors conventions` and docs/conventions.md: the records themselves, and tables made by running the code."""

from __future__ import annotations

import json
import re

import pytest

from vtensors import grouping
from vtensors.cli import main
from vtensors.manager import Plugins
from vtensors.registry import Owned
from vtensors_plugins.commands.conventions import print_conventions
from vtensors_plugins.commands.conventions_facts import (
    KV_SCALE_NAMES,
    STACKED_NAMES,
    activation_table,
    kv_scale_table,
    stacked_table,
    waiver_table,
)
from vtensors_plugins.commands.conventions_page import page, sections
from vtensors_plugins.conventions import unsupported


@pytest.fixture
def plugins() -> Plugins:
    return Plugins.discover(third_parties=[], environ={})


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    assert main(["conventions", "--json", *words]) == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["conventions"]}


def test_json_holds_every_form_of_every_convention(
    capsys: pytest.CaptureFixture[str], plugins: Plugins
) -> None:
    shown = _json(capsys)
    for name, owned in plugins.registry.conventions.items():
        assert shown[name]["distribution"] == "vtensors"
        forms = shown[name]["forms"]
        assert isinstance(forms, list)
        assert [(form["scheme"], len(form["tensors"])) for form in forms] == [
            (form.scheme, len(form.tensors)) for form in owned.record.forms
        ]


def test_the_page_has_a_row_for_each_tensor_of_each_form(plugins: Plugins) -> None:
    records = [owned.record for owned in plugins.registry.conventions.values()]
    text = page(records)
    assert text.count("| codes | - |") == sum(len(record.forms) for record in records)
    for record in records:
        for form in record.forms:
            assert f"weight = `{form.formula}`" in text
            for tensor in form.tensors:
                name = f"`{tensor.suffix}`" if tensor.required else f"(`{tensor.suffix}`)"
                shapes = " or ".join(f"`{shape}`" for shape in tensor.shapes)
                sense = tensor.sense or "-"
                assert f"| {name} | {', '.join(tensor.dtypes)} | {shapes} | {tensor.role} | {sense} |" in text


def test_every_heading_of_the_page_is_its_own(plugins: Plugins) -> None:
    headings = re.findall(r"^#+ .*$", page(o.record for o in plugins.registry.conventions.values()), re.M)
    assert len(headings) == len(set(headings))


def test_a_named_convention_is_shown_alone(capsys: pytest.CaptureFixture[str], plugins: Plugins) -> None:
    assert list(_json(capsys, "hf-fp8")) == ["hf-fp8"]
    assert main(["conventions", "--markdown", "hf-fp8"]) == 0
    record = plugins.registry.conventions["hf-fp8"].record
    assert capsys.readouterr().out == sections([record]) + "\n"


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conventions", "modelop", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["seen"] == "modelop"
    assert "modelopt" in error["accepted"]


def test_two_formats_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conventions", "--json", "--markdown"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "RequestError"


def test_the_table_names_a_third_party_and_marks_what_may_be_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plugins: Plugins
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    record = plugins.registry.conventions["modelopt"].record
    print_conventions([Owned(record=record, plugin="theirs", distribution="their-package")])
    out = capsys.readouterr().out
    assert "(plugin theirs of their-package)" in out
    assert "(pre_quant_scale)" in out
    assert "(weight)" not in out
    assert max(map(len, out.splitlines())) <= 80


# Rows of the table of the design: executed under None, "declared", "fp4", VT_MODELOPT_W4A4 and VT_FP8_W8A8.
@pytest.mark.parametrize(
    ("module", "executed"),
    [
        ("ModelOpt `NVFP4`", "16bit fp4 fp4 fp4 16bit"),
        ("ModelOpt `W4A16_NVFP4`", "16bit 16bit fp4* fp4* 16bit"),
        ("ModelOpt `NVFP4` without `input_scale`", "16bit 16bit* 16bit* 16bit* 16bit"),
        ("compressed-tensors NVFP4", "16bit fp4 fp4 16bit 16bit"),
        ("FP8, static", "16bit fp8-static 16bit 16bit fp8-static"),
        ("FP8 or MXFP8, dynamic", "16bit fp8-dynamic 16bit 16bit fp8-dynamic"),
        ("BF16, F16, F32", "16bit 16bit 16bit 16bit 16bit"),
    ],
)
def test_the_activation_table_is_that_of_the_design(module: str, executed: str) -> None:
    [row] = [line for line in activation_table().splitlines() if line.startswith(f"| {module} |")]
    cells = [re.sub(r" \(\d\)", "*", cell) for cell in row.strip("| ").split(" | ")]
    assert " ".join(cells[2:]) == executed


def test_every_spelling_of_a_stacked_tensor_is_shown_with_the_tensor_that_it_is() -> None:
    text, names = stacked_table()
    known = {f"gate_up_proj{suffix}" for suffix in grouping._STACKED_SUFFIX}
    assert known <= set(STACKED_NAMES)
    assert "| `mlp.experts.gate_up_proj_scale` | `mlp.experts.gate_up_proj` | `weight_scale` |" in text
    assert names == [f"mlp.experts.{expert}.{half}_proj" for expert in (0, 1) for half in ("gate", "up")]


def test_every_name_of_a_kv_scale_is_one_that_the_grouping_knows() -> None:
    text = kv_scale_table()
    assert all(f"| `{name}` |" in text for name in KV_SCALE_NAMES)
    assert "| `self_attn.k_proj.output_scale` | `k` of `self_attn` |" in text


def test_waivers_name_tensors_and_reason() -> None:
    text = waiver_table()
    assert "`model.visual.*`" in text
    assert "| `*.rotary_emb.inv_freq` | rotary frequencies: computed from config.json |" in text


def test_the_page_lists_every_refused_method(plugins: Plugins) -> None:
    text = page(owned.record for owned in plugins.registry.conventions.values())
    assert all(f"| `{method}` | {what} |" in text for method, what in unsupported.METHODS.items())
