"""DST is whole or absent, whatever stops the work; what is finished is found again and checked."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from conversion.stored import modelopt_nvfp4, run, stored_tensors
from vtensors.cli import main
from vtensors.conversion import journal as journal_module
from vtensors.conversion.journal import JOURNAL_NAME
from vtensors.conversion.output import locked, partial_directory
from vtensors.header import read_header


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return modelopt_nvfp4(tmp_path / "source")


def _convert(capsys: Any, source: Path, out: Path, *words: str) -> tuple[int, Any]:
    return run(capsys, "convert", source, out, "--to", "compressed-tensors", *words)


def _partials(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if ".partial-" in path.name)


def test_a_dry_run_writes_nothing_and_gives_the_exact_sizes(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    status, planned = _convert(capsys, source, tmp_path / "out", "--dry-run")
    assert status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    _convert(capsys, source, tmp_path / "out")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert sizes == {file["file"]: file["bytes"] for file in planned["files"]}
    assert planned["total_bytes"] == sum(sizes.values())
    fates = {row["module"]: row["fate"] for row in planned["modules"]}
    assert fates["lm_head"] == "kept"
    assert fates["model.layers.0.mlp.up_proj"] == "respelled"


def test_the_summary_names_what_changes_before_what_is_kept(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "compressed-tensors"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert re.search(r"-> compressed-tensors: \d+ respelled, \d+ kept$", first)


def test_shards_keep_to_the_limit_and_the_index_names_every_tensor(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert _convert(capsys, source, out, "--max-shard-size", "2kB")[0] == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored_tensors(out).keys()
    for name in set(index["weight_map"].values()):
        header = read_header(out / name, name)
        assert header.metadata == {"format": "pt"}
        assert sum(info.nbytes for info in header.tensors) <= 2000 or len(header.tensors) <= 4
        for info in header.tensors:
            assert info.begin % {"F32": 4, "BF16": 2}.get(info.dtype, 1) == 0
    assert _convert(capsys, source, tmp_path / "whole")[0] == 0
    assert stored_tensors(out) == stored_tensors(tmp_path / "whole")
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()


def test_a_killed_run_goes_on_with_the_finished_files(source: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    child = os.fork()
    if child == 0:  # the child dies without any chance to clean up, after two files
        add = journal_module.Journal.add
        count = [0]

        def dying(self: Any, *record: Any) -> None:
            add(self, *record)
            count[0] += 1
            if count[0] == 2:
                os._exit(9)

        journal_module.Journal.add = dying  # type: ignore[method-assign]
        _convert(capsys, source, out, "--max-shard-size", "2kB")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not out.exists()
    assert len(_partials(tmp_path)) == 1

    status, report = _convert(capsys, source, out, "--max-shard-size", "2kB")
    assert status == 0
    assert [file["resumed"] for file in report["files"]][:3] == [True, True, False]
    assert _partials(tmp_path) == []
    assert not (out / JOURNAL_NAME).exists()
    _convert(capsys, source, tmp_path / "fresh", "--max-shard-size", "2kB")
    assert stored_tensors(out) == stored_tensors(tmp_path / "fresh")


def test_a_finished_file_that_changed_is_written_again(
    source: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _stop_after(monkeypatch, files=2)
    with pytest.raises(RuntimeError):
        _run_bare(source, out)
    monkeypatch.undo()
    (partial,) = _partials(tmp_path)
    victim = partial / sorted(name.name for name in partial.glob("*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    status, report = _convert(capsys, source, out, "--max-shard-size", "2kB")
    assert status == 0
    assert [file["resumed"] for file in report["files"]][:3] == [False, True, False]


def test_another_plan_does_not_continue_this_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    _stop_after(monkeypatch, files=2)
    with pytest.raises(RuntimeError):
        _run_bare(source, out)
    monkeypatch.undo()
    os.utime(source / "model.safetensors", ns=(1, 1))
    status, report = _convert(capsys, source, out, "--max-shard-size", "2kB")
    assert status == 0
    assert not any(file["resumed"] for file in report["files"])


def _stop_after(monkeypatch: pytest.MonkeyPatch, *, files: int) -> None:
    add = journal_module.Journal.add
    count = [0]

    def stopping(self: Any, *record: Any) -> None:
        add(self, *record)
        count[0] += 1
        if count[0] == files:
            raise RuntimeError("stopped")

    monkeypatch.setattr(journal_module.Journal, "add", stopping)


def _run_bare(source: Path, out: Path) -> None:
    from vtensors import open_checkpoint
    from vtensors.conversion import parse_target, plan_conversion, run_plan

    checkpoint = open_checkpoint(source)
    target, _ = parse_target(checkpoint.plugins, "compressed-tensors")
    plan = plan_conversion(checkpoint, target, lambda module: None, max_shard_bytes=2000)
    run_plan(checkpoint, plan, out)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_failed_write_is_named_and_leaves_nothing(
    code: int, source: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", failing)
    status, report = _convert(capsys, source, tmp_path / "out")
    assert status == 2
    assert report["error"]["type"] == "OutputError"
    assert ("no space" in report["error"]["message"]) == (code == errno.ENOSPC)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_too_small_is_refused_before_any_file(
    source: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    status, report = _convert(capsys, source, tmp_path / "out")
    assert status == 2
    assert "not enough space" in report["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_place_below_a_file_is_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    status, report = _convert(capsys, source, tmp_path / "file" / "out")
    assert (status, report["error"]["type"]) == (2, "OutputError")


def test_a_full_destination_is_refused_without_overwrite(source: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    status, report = _convert(capsys, source, out)
    assert status == 2
    assert "not empty" in report["error"]["message"]
    assert (out / "precious").read_text() == "mine"
    assert _convert(capsys, source, out, "--overwrite")[0] == 0
    assert not (out / "precious").exists()
    assert [path.name for path in tmp_path.iterdir() if "old" in path.name] == []


def test_an_empty_destination_is_used(source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    assert _convert(capsys, source, tmp_path / "out")[0] == 0


@pytest.mark.parametrize("place", ["source", "source/inside", "."])
def test_the_source_is_never_written_to(place: str, source: Path, tmp_path: Path, capsys: Any) -> None:
    status, report = _convert(capsys, source, tmp_path / place, "--overwrite")
    assert status == 2
    assert "source" in report["error"]["message"]
    assert stored_tensors(source)


def test_two_processes_do_not_write_one_conversion(source: Path, tmp_path: Path, capsys: Any) -> None:
    from vtensors import open_checkpoint
    from vtensors.conversion import parse_target, plan_conversion

    checkpoint = open_checkpoint(source)
    target, _ = parse_target(checkpoint.plugins, "compressed-tensors")
    plan = plan_conversion(checkpoint, target, lambda module: None)
    partial = partial_directory(tmp_path / "out", plan.fingerprint)
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"the other one's")
    with locked(partial):
        status, report = _convert(capsys, source, tmp_path / "out")
    assert status == 2
    assert "another process" in report["error"]["message"]
    assert (partial / "model.safetensors").read_bytes() == b"the other one's"


def test_a_source_that_changes_meanwhile_is_refused(source: Path, tmp_path: Path) -> None:
    from vtensors import CheckpointError, open_checkpoint
    from vtensors.conversion import parse_target, plan_conversion, run_plan

    checkpoint = open_checkpoint(source)
    target, _ = parse_target(checkpoint.plugins, "compressed-tensors")
    plan = plan_conversion(checkpoint, target, lambda module: None)
    os.truncate(source / "model.safetensors", 2000)
    with pytest.raises(CheckpointError, match="changed while open"):
        run_plan(checkpoint, plan, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_link_that_leaves_the_checkpoint_is_not_copied(source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "secret").write_text("mine")
    (source / "vocab.json").symlink_to(tmp_path / "secret")
    status, report = _convert(capsys, source, tmp_path / "out")
    assert status == 2
    assert "vocab.json" in report["error"]["file"]


@pytest.mark.parametrize("text", ["0", "-5GB", "much", "", "1e400GB"])
def test_a_shard_size_that_is_none_is_refused(text: str, source: Path, tmp_path: Path, capsys: Any) -> None:
    status, report = _convert(capsys, source, tmp_path / "out", f"--max-shard-size={text}")
    assert status == 2
    assert "max-shard-size" in report["error"]["message"]
