"""The README shows what the program prints and lists what the plugins provide."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from project.source_tree import REPOSITORY
from vtensors.cli import main
from vtensors.manager import Plugins

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
# The width of the terminal in which the pictures were taken.
COLUMNS = "110"


@pytest.fixture
def plugins() -> Plugins:
    return Plugins.discover(third_parties=[], environ={})


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", COLUMNS)
    for name in ("VT_FP8_W8A8", "VT_MODELOPT_W4A4", "VT_PLUGINS", "VT_STRICT"):
        monkeypatch.delenv(name, raising=False)


def _picture(command: str) -> str:
    found = re.search(
        rf"^```console\n\$ vtensors {command}[^\n]*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL
    )
    assert found, f"no picture of {command}"
    return found[1]


def test_the_table_of_conventions_and_schemes_is_what_the_forms_say(plugins: Plugins) -> None:
    heads, _, *rows = re.findall(r"^\|.*\|$", README[README.index("| convention |") :], re.MULTILINE)[:6]
    columns = [head.split(", ") for head in heads.strip("| ").split(" | ")[1:]]
    assert sorted(name for names in columns for name in names) == sorted(plugins.registry.schemes)
    listed = {}
    for row in rows:
        name, *cells = row.strip("| ").split(" | ")
        listed[name.strip("`")] = [cell == "yes" for cell in cells]
    expected = {}
    for name, owned in plugins.registry.conventions.items():
        if owned.record.forms:
            schemes = {form.scheme for form in owned.record.forms}
            expected[name] = [set(names) <= schemes for names in columns]
    assert listed == expected


def test_every_architecture_is_listed_with_its_model_types(plugins: Plugins) -> None:
    for name, owned in plugins.registry.architectures.items():
        types = ", ".join(f"`{model_type}`" for model_type in owned.record.model_types)
        assert f"| `{name}` | {types} | {owned.record.summary} |" in README
    assert len(re.findall(r"^\| `\w+` \| `\w+`", README, re.MULTILINE)) == len(plugins.registry.architectures)


def test_the_picture_of_inspect_is_what_it_prints(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "Qwen3.6-27B-NVFP4"
    tool = [sys.executable, str(shared / "tools" / "phantom.py"), f"nvidia/{name}", str(tmp_path / name)]
    subprocess.run(tool, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", name]) == 0
    assert capsys.readouterr().out == _picture("inspect")


@pytest.mark.slow
def test_the_picture_of_generate_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def timeless(text: str) -> list[str]:
        return [line for line in text.splitlines() if "tokens/s" not in line]

    assert main(["generate", "--device", "cpu"]) == 0
    assert timeless(capsys.readouterr().out) == timeless(_picture("generate"))
