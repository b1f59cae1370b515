"""`vtensors inspect` as a program: its exit status, its JSON, and what a person sees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vtensors.cli import main
from vtensors_plugins.safetensors_edits import StoredCheckpoint

DATA = Path(__file__).parents[1] / "data"
MIXED = DATA / "qwen35vl-modelopt-mixed-w4a16mlp-fp8attn"
NVFP4 = DATA / "qwen3-modelopt-nvfp4-kvfp8"
MOE = DATA / "qwen35moe-modelopt-moe-mixed-w4a16"
SURPLUS = "model.language_model.layers.0.mlp.down_proj.weight_scale_3"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `vtensors inspect` in a terminal of 80 columns: (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("VT_PLUGINS", "VT_PREFER", "VT_STRICT", "VT_FP8_W8A8", "VT_MODELOPT_W4A4"):
        monkeypatch.delenv(name, raising=False)

    def call(source: Path, *words: str) -> tuple[int, str, str]:
        status = main(["inspect", str(source), *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def surplus(tmp_path: Path) -> Path:
    """The mixed checkpoint with one tensor more, for which no convention has a place."""
    stored = StoredCheckpoint.load(MIXED)
    beside = next(name for name in stored.tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    assert beside.rpartition(".")[0] == SURPLUS.rpartition(".")[0]
    return stored.with_tensor(SURPLUS, "F32", (1,), beside=beside).save(tmp_path / "surplus")


def _report(run: Run, source: Path, *words: str) -> dict[str, Any]:
    return json.loads(run(source, "--json", *words)[1])


def test_json_has_every_key_of_the_contract(run: Run) -> None:
    status, out, err = run(MIXED, "--json")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert set(report) >= {
        "provenance",
        "architecture",
        "schemes",
        "waived",
        "unclaimed",
        "conflicts",
        "total_bytes",
    }
    for row in report["schemes"]:
        assert set(row) >= {"scheme", "convention", "declared", "executed", "modules", "bytes"}
        assert isinstance(row["modules"], int)
        assert isinstance(row["bytes"], int)
    assert report["provenance"]["shards"][0]["header_sha256"]
    assert report["architecture"] == "Qwen3_5ForConditionalGeneration"
    assert report["unclaimed"] == []


def test_json_counts_modules_tensors_and_bytes_of_the_file(run: Run) -> None:
    report = _report(run, MIXED)
    counted = {(row["scheme"], row["declared"]): row["modules"] for row in report["schemes"]}
    assert counted == {("fp8-tensor", "fp8-static"): 7, ("nvfp4", "16bit"): 7, ("bf16", "16bit"): 14}
    stored = StoredCheckpoint.load(MIXED)
    vision = [name for name in stored.tensors if "visual" in name]
    [waived] = [row for row in report["waived"] if row["reason"].startswith("vision")]
    assert waived["tensors"] == len(vision)
    assert report["total_bytes"] == sum(len(tensor.data) for tensor in stored.tensors.values())


def test_json_of_a_contradiction_says_where_what_and_what_was_followed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "contradicts"
    shutil.copytree(NVFP4, folder)
    path = folder / "hf_quant_config.json"
    quant = json.loads(path.read_text())
    quant["quantization"]["quant_algo"] = "FP8"
    path.write_text(json.dumps(quant))
    report = _report(run, folder)
    assert report["conflicts"]
    for conflict in report["conflicts"]:
        assert set(conflict) >= {"where", "says", "instead", "chosen"}
    status, out, _ = run(folder)
    assert status == 0
    for word in ("conflict", "says", "against", "followed"):
        assert word in out
    monkeypatch.setenv("VT_STRICT", "conflicts")
    assert run(folder)[0] == 1


def test_an_unclaimed_tensor_is_a_finding_that_is_named(run: Run, surplus: Path) -> None:
    status, out, _ = run(surplus, "--json")
    assert status == 1
    report = json.loads(out)
    assert SURPLUS in report["unclaimed"]
    assert any(SURPLUS in problem for problem in report["problems"])
    status, out, _ = run(surplus)
    assert status == 1
    assert "refused  " in out
    assert SURPLUS in out
    assert "consumed or waived" not in out


def test_a_checkpoint_that_cannot_be_opened_exits_with_two(run: Run, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(MIXED, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    status, out, err = run(broken)
    assert (status, out) == (2, "")
    assert "model.safetensors" in err


def test_an_error_under_json_is_an_object_on_stdout(run: Run, tmp_path: Path) -> None:
    status, out, err = run(tmp_path, "--json")
    assert (status, err) == (2, "")
    error = json.loads(out)["error"]
    assert set(error) == {"type", "message", "file", "tensor", "seen", "accepted", "fix"}
    assert error["type"] == "CheckpointError"


def test_activations_choose_what_executed_shows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def executed(*words: str) -> dict[str, str]:
        return {row["scheme"]: row["executed"] for row in _report(run, MIXED, *words)["schemes"]}

    assert executed() == {"fp8-tensor": "16bit", "nvfp4": "16bit", "bf16": "16bit"}
    assert executed("--activations", "declared")["fp8-tensor"] == "fp8-static"
    monkeypatch.setenv("VT_FP8_W8A8", "1")
    assert executed()["fp8-tensor"] == "fp8-static"
    assert executed("--activations", "16bit")["fp8-tensor"] == "16bit"


def test_unknown_activations_are_a_usage_error_that_names_the_choices(run: Run) -> None:
    status, out, _ = run(MIXED, "--json", "--activations", "int4")
    assert status == 2
    assert "declared" in json.loads(out)["error"]["message"]


def test_module_explains_tensors_evidence_declared_and_executed(run: Run) -> None:
    status, out, _ = run(MIXED, "--module", r"layers\.0\.mlp\.down_proj$")
    assert status == 0
    for words in ("down_proj", "nvfp4", "declared  W4A16_NVFP4", "executed", "evidence", "weight_scale_2"):
        assert words in out
    [module] = _report(run, MIXED, "--module", r"layers\.0\.mlp\.down_proj$")["modules"]
    assert module["scheme"] == "nvfp4"
    assert {tensor["role"] for tensor in module["tensors"]} >= {"codes", "block_scale", "global_scale"}


def test_module_tells_of_an_unclaimed_one_why_each_convention_leaves_it(run: Run, surplus: Path) -> None:
    status, out, _ = run(surplus, "--module", r"layers\.0\.mlp\.down_proj")
    assert status == 1
    assert run(surplus, "--module", r"layers\.0\.mlp\.up_proj")[0] == 0
    assert "unclaimed" in out
    assert "weight_scale_3" in out
    assert "modelopt: " in out


def test_a_module_that_is_not_there_is_refused_with_the_nearest_and_what_to_do(run: Run) -> None:
    _, _, err = run(NVFP4, "--module", "model.layers.0.mlp.down_prj")
    assert "seen: --module 'model.layers.0.mlp.down_prj'" in err
    assert "in the name of one of 24 modules, such as 'model.layers.0.mlp.down_proj'" in err
    assert "what to do: list the modules with --tree" in err


@pytest.mark.parametrize(("pattern", "words"), [("no_such_module", "no module"), ("(", "regular expression")])
def test_a_pattern_that_finds_nothing_is_refused(run: Run, pattern: str, words: str) -> None:
    status, out, _ = run(MIXED, "--json", "--module", pattern)
    assert status == 2
    assert words in json.loads(out)["error"]["message"]


def test_tree_shows_each_layer_and_counts_experts_that_are_alike(run: Run) -> None:
    out = run(MOE, "--tree")[1]
    assert "model.layers.0" in out
    assert "mlp.experts.*.down_proj x8  nvfp4 [128, 128]" in out
    modules = _report(run, MOE, "--tree")["modules"]
    assert sum(".experts." in module["module"] for module in modules) == 2 * 8 * 3


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("source", sorted(path for path in DATA.iterdir() if (path / "config.json").exists()))
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(
    source: Path, columns: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(source)[1].splitlines()[1:]  # the first line is the path as given
    assert max(map(len, out)) <= columns
    words = " ".join(out).replace(",", " ").split()
    for row in _report(run, source)["schemes"]:
        assert row["scheme"] in words
        assert row["convention"] in words
        assert set(row["parts"]) <= set(words)
