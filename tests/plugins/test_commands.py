from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vtensors.cli import main
from vtensors.manager import Plugins
from vtensors_plugins.commands.env import DISTRIBUTIONS, markdown_of
from vtensors_plugins.commands.plugins import format_statuses

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def without_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VT_PLUGINS", "VT_PREFER", "VT_STRICT", "VT_MMAP", "VT_FP8_W8A8"):
        monkeypatch.delenv(name, raising=False)


def test_docs_environment_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--markdown"]) == 0
    written = (ROOT / "docs" / "environment.md").read_text()
    assert capsys.readouterr().out == written, "run: vtensors env --markdown > docs/environment.md"


def test_env_shows_each_switch_with_value_default_and_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VT_MMAP", "off")
    assert main(["env", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    switches = {switch["name"]: switch for switch in shown["switches"]}
    assert (switches["VT_MMAP"]["value"], switches["VT_MMAP"]["default"]) == (False, "1")
    assert switches["VT_MMAP"]["source"] == "environment"
    assert switches["VT_FP8_W8A8"]["value"] is False
    assert switches["VT_FP8_W8A8"]["source"] == "default"
    assert switches["VT_STRICT"]["value"] == []
    assert switches["VT_STRICT"]["plugin"] == "switches"
    assert set(shown["versions"]) == set(DISTRIBUTIONS)
    assert shown["versions"]["torch"]
    assert shown["platform"]["python"] == sys.version.split()[0]


def test_env_text_names_every_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "VT_LMHEAD_QUANTIZED   1  (default)" in out
    assert "VT_PLUGINS            (empty)  (default)" in out


def test_env_refuses_a_bad_value(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VT_MMAP", "perhaps")
    assert main(["env", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "SwitchError"
    assert "VT_MMAP" in error["message"]


def test_env_refuses_two_formats_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json", "--markdown"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "RequestError"


def test_markdown_lists_each_switch_once() -> None:
    plugins = Plugins.discover(third_parties=[], environ={})
    records = [owned.record for owned in plugins.registry.switches.values()]
    text = markdown_of(records)
    assert all(text.count(f"| `{record.name}` |") == 1 for record in records)


def test_plugins_json_says_whence_each_comes_and_what_it_provides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    shown = {plugin["name"]: plugin for plugin in json.loads(capsys.readouterr().out)["plugins"]}
    commands = shown["commands"]
    assert commands["distribution"] == "vtensors"
    assert commands["state"] == "active"
    assert commands["hooks"] == ["vtensors_plugin", "vtensors_commands"]
    assert commands["load_ms"] >= 0
    assert commands["error"] == ""
    assert commands["version"]


def test_plugins_shows_a_denied_one_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VT_PLUGINS", "-llama")
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    assert "denied by VT_PLUGINS=-llama" in out
    assert out.splitlines()[0].split() == ["name", "distribution", "version", "state", "ms", "hooks"]


def test_the_traceback_of_a_broken_plugin_is_shown_on_request() -> None:
    plugins = Plugins.discover(builtins=[("gone", "vtensors_plugins.gone")], third_parties=[], environ={})
    assert "ModuleNotFoundError" in format_statuses(plugins.statuses)
    assert "Traceback" not in format_statuses(plugins.statuses)
    assert "Traceback" in format_statuses(plugins.statuses, tracebacks=True)
