from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fake_model import FakeModel
from vtensors.errors import RequestError
from vtensors.records import Command, PluginInfo
from vtensors_engine import bundled, plugin
from vtensors_engine.commands import generate, generate_report
from vtensors_engine.llm import LLM
from vtensors_engine.sampling import SamplingParams
from vtensors_plugins.commands.schemes_table import schemes_table

Run = Callable[..., Result]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The arguments of every load; a fake model is what it gives, and a fake bundled checkpoint is there."""
    seen: list[dict[str, Any]] = []

    def load_model(path: str, **options: Any) -> FakeModel:
        seen.append({"path": path, **options})
        return FakeModel(max_positions=400)

    monkeypatch.setitem(sys.modules, "vtensors_engine.loading", SimpleNamespace(load_model=load_model))
    monkeypatch.setattr(generate, "bundled_checkpoint", lambda: tmp_path / "bundled")
    return seen


@pytest.fixture
def run(loads: list[dict[str, Any]]) -> Run:
    def call(*words: str) -> Result:
        return CliRunner().invoke(generate.command, list(words), catch_exceptions=False)

    return call


def test_the_plugin_names_the_command_and_the_command_can_be_imported() -> None:
    assert isinstance(plugin.vtensors_plugin(), PluginInfo)
    [record] = plugin.vtensors_commands()
    assert isinstance(record, Command)
    module, _, name = record.load.partition(":")
    assert getattr(importlib.import_module(module), name) is generate.command
    assert record.name == generate.command.name == "generate"


def test_without_a_model_the_bundled_one_says_the_same_text_every_time(
    run: Run, loads: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, second = run("--device", "cpu"), run("--device", "cpu")
    assert first.exit_code == 0
    assert loads[0]["path"] == tmp_path / "bundled"
    params = SamplingParams(max_tokens=128, temperature=0.8, seed=generate.DEMO_SEED)
    expected = LLM(FakeModel(max_positions=400)).generate("In the beginning", params)[0]
    text = "In the beginning" + (expected.text or "") + "\n"
    assert first.stdout.startswith(text)
    assert second.stdout.startswith(text)


def test_speed_and_the_executed_table_follow_the_text(run: Run) -> None:
    shown = run("--device", "cpu").stdout
    speed = next(line for line in shown.splitlines() if "tokens/s" in line)
    assert "prefill" in speed
    assert "decode" in speed
    table = shown[shown.index(speed) + len(speed) :].strip("\n")
    assert table == schemes_table(FakeModel().executed_summary(), 80)
    for word in ("scheme", "convention", "declared", "executed", "modules", "size", "nvfp4", "1.23 MB"):
        assert word in table


def test_options_reach_the_loader_and_the_sampling(run: Run, loads: list[dict[str, Any]]) -> None:
    words = "some/model -p word --max-tokens 5 --temperature 0 --ignore-eos --revision v1 --device cpu"
    words += " --dtype bfloat16 --activations declared --json"
    report = json.loads(run(*words.split()).stdout)
    assert loads[0]["path"] == "some/model"
    assert (loads[0]["revision"], loads[0]["activations"]) == ("v1", "declared")
    assert str(loads[0]["dtype"]) == "torch.bfloat16"
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = LLM(FakeModel()).generate("word", greedy)[0]
    [completion] = report["completions"]
    assert completion["token_ids"] == list(expected.token_ids)
    assert completion["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert (completion["text"], completion["finish_reason"]) == (expected.text, "length")


def test_json_holds_model_and_executed_and_nothing_else_is_on_stdout(run: Run) -> None:
    report = json.loads(run("some/model", "-p", "a", "-p", "b", "--device", "cpu", "--json").stdout)
    assert len(report["completions"]) == 2
    assert report["model"]["provenance"]["commit"] == "0" * 40
    assert report["model"]["architecture"] == "FakeForCausalLM"
    assert report["executed"] == FakeModel().executed_summary()
    assert report["kv_cache"] == {"declared": None, "executed": "16bit"}


def test_several_prompts_are_printed_in_their_order(run: Run) -> None:
    shown = run("some/model", "-p", "a", "-p", "b", "--device", "cpu", "--seed", "1").stdout
    assert shown.index("--- prompt 0 (") < shown.index("--- prompt 1 (")


def test_chat_goes_through_the_template(run: Run) -> None:
    report = json.loads(run("some/model", "-p", "word", "--chat", "--device", "cpu", "--json").stdout)
    ids = LLM(FakeModel()).chat_prompt([{"role": "user", "content": "word"}])
    assert report["completions"][0]["prompt_token_ids"] == ids


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--revision", "v1"], "needs a MODEL"),
        (["--activations", "int4"], "16bit"),
        (["--max-tokens", "many"], "max-tokens"),
    ],
)
def test_a_usage_error_exits_with_two_and_says_what_is_missing(
    run: Run, words: list[str], message: str
) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_refused_parameter_is_left_to_the_program_to_report(run: Run, loads: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="top_p"):
        run("--top-p", "0")
    assert loads == []


def test_a_missing_bundled_checkpoint_is_refused_with_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bundled.resources, "files", lambda package: tmp_path)
    with pytest.raises(RequestError, match=bundled.BUNDLED_NAME):
        bundled.bundled_checkpoint()
    folder = tmp_path / "bundled" / bundled.BUNDLED_NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert bundled.bundled_checkpoint() == folder


@pytest.mark.parametrize(
    ("declared", "kept", "line"),
    [
        ("FP8", "16bit", "KV cache  declared FP8, executed 16bit"),
        (None, "fp8", "KV cache  declared 16bit, executed fp8"),
        (None, "16bit", ""),
    ],
)
def test_declared_and_executed_precision_of_the_kv_cache_are_both_told(
    declared: str | None, kept: str, line: str
) -> None:
    model = SimpleNamespace(
        kv_cache=kept,
        checkpoint=SimpleNamespace(kv_cache=SimpleNamespace(algorithm=declared) if declared else None),
    )
    assert generate_report.kv_cache_line(model) == line  # type: ignore[arg-type]
    assert generate_report.kv_cache_precision(model) == {  # type: ignore[arg-type]
        "declared": declared,
        "executed": kept,
    }
