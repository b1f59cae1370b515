"""docs/commands.md: its examples print what they say, and its tables name every command, option and field."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from edited_checkpoints import edited
from project.source_tree import REPOSITORY
from vtensors.cli import import_command, main
from vtensors.manager import Plugins

PAGE = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
LLAMA = REPOSITORY / "tests" / "data" / "llama-llmcompressor-nvfp4a16"
LOST = "model.layers.1.mlp.up_proj.weight_scale"
# Examples whose exit status is not 0.
STATUSES = {"inspect damaged": 1, "VT_MMAP=maybe env": 2}
COLUMNS = "100"


def _examples() -> list[tuple[str, str]]:
    """Each command of a console block with what it shows; blank lines kept."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    parts = [re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:] for block in blocks]
    return [
        (line.replace("vtensors ", "", 1), shown)
        for part in parts
        for line, shown in zip(part[::2], part[1::2], strict=True)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the tests' checkpoints and one that lost a scale, and no switch set."""
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    edited(LLAMA, tmp_path / "damaged", lambda tensors: tensors.pop(LOST))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    for name in ("VT_FP8_W8A8", "VT_MODELOPT_W4A4", "VT_PLUGINS", "VT_STRICT", "VT_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "shown"), [pytest.param(*example, id=example[0]) for example in _examples()]
)
def test_an_example_prints_what_the_page_says(
    line: str,
    shown: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(line)
    while words[0].startswith("VT_"):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert main(words) == STATUSES.get(line, 0)
    out, err = capsys.readouterr()
    printed = "\n".join(text.rstrip() for text in (out or err).splitlines()) + "\n"
    # The widths of these columns are those of versions and times.
    spaces = doctest.NORMALIZE_WHITESPACE if "plugins" in words else 0
    assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | spaces), printed


def test_every_command_is_in_the_table_and_prints_json() -> None:
    commands = Plugins.discover(third_parties=[], environ={}).registry.commands
    table = PAGE[: PAGE.index("\n\nPlugins may bring more")]
    assert sorted(re.findall(r"`vtensors (\w+)`", table)) == sorted(commands)
    for owned in commands.values():
        assert "--json" in _options(import_command(owned)), owned.record.name


@pytest.mark.parametrize("name", ["inspect", "generate", "kernels", "conventions", "plugins", "env"])
def test_a_section_names_every_option_of_its_command_and_no_other(name: str) -> None:
    owned = Plugins.discover(third_parties=[], environ={}).registry.commands[name]
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section))
    assert told == _options(import_command(owned))


def test_the_fields_of_generate_and_inspect_are_those_that_are_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--max-tokens", "1", "--device", "cpu", "--json"]) == 0
    assert _fields("generate") == set(json.loads(capsys.readouterr().out))
    assert main(["inspect", str(LLAMA), "--tree", "--json"]) == 0
    assert _fields("inspect") == set(json.loads(capsys.readouterr().out))


def _options(command: click.Command) -> set[str]:
    """The long names of a command's options, but for --help."""
    return {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name.startswith("--")
    }


def _fields(name: str) -> set[str]:
    """The first column of the section's table of JSON fields."""
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    table = section[section.index("| field of `--json` |") :].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    return {field for row in rows for field in re.findall(r"`(\w+)`", row.split("|")[1])}
