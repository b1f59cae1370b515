from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest

from fake_plugins import candidate, discover, module
from vtensors.cli import main
from vtensors.errors import CheckpointError
from vtensors.manager import Plugins
from vtensors.records import Command

CHECKPOINT = str(Path(__file__).parents[1] / "data" / "qwen3-modelopt-nvfp4-kvfp8")

Finder = Callable[[], Plugins]


def provide(monkeypatch: pytest.MonkeyPatch, **commands: click.Command | str) -> Finder:
    """Plugins whose only records are these commands; a text stands for a path that cannot be imported."""
    home = ModuleType("fake_commands")
    records = []
    for name, command in commands.items():
        load = command if isinstance(command, str) else f"fake_commands:{name}"
        records.append(Command(name=name, summary=f"Does {name}.", load=load))
        if not isinstance(command, str):
            setattr(home, name, command)
    monkeypatch.setitem(sys.modules, "fake_commands", home)
    plugins = discover(candidate("acme", module("acme", {"vtensors_commands": lambda: records})))
    return lambda: plugins


def calling(function: Callable[[], object], *, has_json: bool = True) -> click.Command:
    options = [click.Option(["--json", "as_json"], is_flag=True, expose_value=False)] if has_json else []
    return click.Command("any", callback=function, params=list(options))


def refuses() -> None:
    raise CheckpointError(
        "the header is too long", file="a.safetensors", tensor="t", seen="9", accepted="8", fix="get it again"
    )


def test_help_lists_summaries_without_importing_any_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"], find_plugins=provide(monkeypatch, weigh="does_not_exist:command")) == 0
    out = capsys.readouterr().out
    assert "weigh" in out
    assert "Does weigh." in out


def test_version_needs_no_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> Plugins:
        raise AssertionError("plugins were looked for")

    assert main(["--version"], find_plugins=fails) == 0
    assert capsys.readouterr().out.startswith("vtensors ")


def test_no_command_shows_the_help_and_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], find_plugins=provide(monkeypatch, weigh=calling(lambda: None))) == 2
    assert "Does weigh." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "status"),
    [(lambda: None, 0), (lambda: 1, 1), (lambda: True, 0), (lambda: click.get_current_context().exit(1), 1)],
)
def test_the_exit_status_is_what_the_command_says(
    function: Callable[[], object], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["weigh"], find_plugins=provide(monkeypatch, weigh=calling(function))) == status


def test_a_refusal_is_told_on_stderr_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weigh"], find_plugins=provide(monkeypatch, weigh=calling(refuses))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: a.safetensors: t: the header is too long")
    assert "Traceback" not in captured.err


def test_a_refusal_under_json_is_one_object_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weigh", "--json"], find_plugins=provide(monkeypatch, weigh=calling(refuses))) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {
            "type": "CheckpointError",
            "message": "the header is too long",
            "file": "a.safetensors",
            "tensor": "t",
            "seen": "9",
            "accepted": "8",
            "fix": "get it again",
        }
    }
    assert captured.err == ""


def test_a_usage_error_under_json_is_one_object_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = provide(monkeypatch, weigh=calling(lambda: None))
    assert main(["weigh", "--jason", "--json"], find_plugins=find) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "NoSuchOption"
    assert "--jason" in error["message"]


def test_an_unknown_command_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["wiegh"], find_plugins=provide(monkeypatch, weigh=calling(lambda: None))) == 2
    assert "Did you mean 'weigh'?" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["does_not_exist:command", "json:nothing", "json:dumps"])
def test_a_command_that_cannot_be_imported_names_its_plugin_and_leaves_the_others_usable(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = provide(monkeypatch, weigh=path, count=calling(lambda: None))
    assert main(["weigh"], find_plugins=find) == 2
    assert "plugin 'acme' (acme-dist)" in capsys.readouterr().err
    assert main(["count"], find_plugins=find) == 0


def raising(error: BaseException) -> click.Command:
    def function() -> None:
        raise error

    return calling(function)


def test_an_interrupt_is_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weigh"], find_plugins=provide(monkeypatch, weigh=raising(KeyboardInterrupt()))) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_mistake_of_the_program_is_neither_findings_nor_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weigh"], find_plugins=provide(monkeypatch, weigh=raising(ZeroDivisionError("oh")))) == 70
    assert "ZeroDivisionError: oh" in capsys.readouterr().err


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("VT_")}
    program = [sys.executable, "-m", "vtensors", *words]
    return subprocess.run(program, capture_output=True, text=True, env=env | environ, timeout=60)


def test_a_closed_pipe_is_quiet() -> None:
    program = [sys.executable, "-m", "vtensors", "plugins", "--json"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert "BrokenPipe" not in err
    assert "Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["env", "--json"]])
def test_output_that_finds_no_space_is_one_line_and_refused(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        program = [sys.executable, "-m", "vtensors", *words]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["\u65e5\u672c", "byte-\udcff"])
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    shown = run("inspect", str(folder), PYTHONIOENCODING="ascii:strict")
    assert shown.returncode == 1, shown.stderr
    assert ascii(name)[1:-1] in shown.stdout
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(("words", "status"), [(["plugins", "--json"], 0), (["inspect", "no-such-place"], 2)])
def test_a_program_without_standard_streams_does_its_work(words: list[str], status: int) -> None:
    code = (
        "import os, sys; sys.stdout = sys.stderr = None\n"
        f"from vtensors.cli import main; os._exit(main({words}))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == status


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["env"], ["env", "--json"]])
def test_commands_that_need_no_weights_import_no_torch(words: list[str]) -> None:
    code = (
        f"import sys; from vtensors.cli import main; status = main({words})\n"
        "sys.exit(status or ('torch' in sys.modules or 'numpy' in sys.modules) * 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_python_dash_m_shows_the_builtin_commands() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    for name in ("inspect", "plugins", "env"):
        assert f"  {name} " in shown.stdout


def test_a_bad_switch_is_a_refusal_of_every_command_that_looks_for_plugins() -> None:
    shown = run("plugins", VT_STRICT="everything")
    assert shown.returncode == 2
    assert "VT_STRICT" in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("words", [["kernels"], ["plugins"], ["env"], ["diff", "SOURCE", "SOURCE"]])
def test_a_mistyped_switch_is_told_once_by_every_command(words: list[str]) -> None:
    words = [CHECKPOINT if word == "SOURCE" else word for word in words]
    shown = run(*words, VT_KERNEL="nvfp4:*")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr.count("VT_KERNEL is set") == 1
    assert "did you mean VT_KERNELS?" in shown.stderr


@pytest.mark.parametrize(
    "words", [["inspect", CHECKPOINT], ["inspect", CHECKPOINT, "--tree"], ["conventions"]]
)
def test_a_reader_who_has_left_is_not_told_as_findings(words: list[str]) -> None:
    program = [sys.executable, "-m", "vtensors", *words]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert err == ""
