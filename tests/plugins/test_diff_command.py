from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from builders import write_json
from sparse_checkpoints import Shapes, published_27b, with_head, write_sparse
from vtensors.cli import main

BF16: Shapes = {"model.norm.weight": ("BF16", (64,)), "lm_head.weight": ("BF16", (32, 64))}
FP8_ROW: Shapes = {
    "model.norm.weight": ("BF16", (64,)),
    "lm_head.weight": ("F8_E4M3", (32, 64)),
    "lm_head.weight_scale": ("F32", (32,)),
}
CONFIG: dict[str, Any] = {
    "model_type": "of-nobody",
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
}
# Runs the command line in a process of its own and tells on stderr whether torch was imported.
COMMAND = """
import sys
from vtensors.cli import main
status = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture
def sides(tmp_path: Path) -> tuple[str, str]:
    return tuple(
        str(write_sparse(tmp_path / name, tensors, CONFIG)) for name, tensors in (("a", BF16), ("b", FP8_ROW))
    )


def test_diff_says_that_the_head_went_from_bf16_to_fp8_per_row(
    sides: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *sides]) == 1
    out = capsys.readouterr().out
    assert "changed  lm_head  BF16 -> FP8 per row\n" in out
    assert "Modules: 1 changed, 1 the same." in out


def test_diff_json_has_the_documented_keys(
    sides: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *sides, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (change,) = report["changed"]
    assert change["module"] == "lm_head"
    assert {"scheme", "convention", "shape"} <= change["before"].keys() & change["after"].keys()
    assert (change["before"]["scheme"], change["after"]["scheme"]) == ("bf16", "fp8-row")
    assert report["added"] == report["removed"] == []
    assert report["identical"] is False
    assert report["before"]["shards"][0]["header_sha256"] != report["after"]["shards"][0]["header_sha256"]


def test_diff_of_a_checkpoint_with_itself_exits_0(
    sides: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", sides[0], sides[0]]) == 0
    assert "Identical by headers and configuration: 2 modules." in capsys.readouterr().out
    assert main(["diff", sides[0], sides[0], "--values", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["identical"], report["compared"]) == (True, "values")
    assert report["values"]["verdict"] == "same bits"


def test_values_that_differ_under_the_same_headers_exit_1(
    sides: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_sparse(tmp_path / "c", BF16, CONFIG)
    with (other / "model.safetensors").open("r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\x80\x3f")  # 1.0 in bfloat16
    assert main(["diff", sides[0], str(other)]) == 0
    assert main(["diff", sides[0], str(other), "--values"]) == 1
    assert "different  lm_head  tensor: 1 of 2,048 differ" in capsys.readouterr().out


def test_diff_of_what_is_no_checkpoint_exits_2(
    sides: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["diff", sides[0], str(tmp_path / "empty"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "CheckpointError"


def test_two_27b_commits_are_compared_by_headers_in_under_a_second_without_torch(
    shared: Path, tmp_path: Path
) -> None:
    published = published_27b(shared)
    snapshots = tmp_path / "models--nvidia--Qwen3.6-27B-NVFP4" / "snapshots"
    one, two = (
        str(write_sparse(snapshots / (letter * 40), *with_head(published, scheme)))
        for letter, scheme in (("a", "bf16"), ("b", "fp8-row"))
    )
    seconds = []
    for _ in range(3):  # the first writes the .pyc files
        start = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-c", COMMAND, "diff", one, two], capture_output=True, text=True, check=False
        )
        seconds.append(time.perf_counter() - start)
    assert result.returncode == 1, result.stderr
    assert result.stderr.splitlines()[-1] == "False"
    changed = [
        line for line in result.stdout.splitlines() if line.startswith(("changed", "added", "removed"))
    ]
    assert changed == ["changed  lm_head  BF16 -> FP8 per row"]
    assert min(seconds) < 1.0


def test_lock_writes_the_default_file_and_says_what_moved_since(
    sides: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lock", sides[0]]) == 0
    assert "vtensors.lock.json: 1 shard, 1 file, 2 modules of 2 kinds" in capsys.readouterr().out
    assert json.loads((tmp_path / "vtensors.lock.json").read_text())["version"] == 1
    assert main(["lock", sides[1]]) == 0
    assert "modules lm_head: bf16 [32, 64] plain 16bit -> fp8-row" in capsys.readouterr().out
    assert main(["lock", sides[1], "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["file"], record["moved"]) == ("vtensors.lock.json", [])
    assert record["lock"]["format"] == "vtensors-lock"


@pytest.fixture
def lock(sides: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A lock of the first side."""
    path = str(tmp_path / "a.lock.json")
    assert main(["lock", sides[0], "-o", path]) == 0
    capsys.readouterr()
    return path


@pytest.mark.parametrize(
    "words",
    [
        "inspect {b} --lock {lock}",
        "generate {b} --lock {lock}",
        "verify {b} --lock {lock}",
        "convert {b} {out} --to plain:bf16 --lock {lock}",
        "quantize {b} {out} --recipe nvfp4 --lock {lock}",
        "diff {b} {a} --lock {lock}",
        "diff {b} {a} --lock-a {lock}",
        "diff {a} {b} --lock-b {lock}",
    ],
)
def test_every_command_refuses_a_checkpoint_that_moved(
    sides: tuple[str, str], lock: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = sides
    arguments = words.format(a=a, b=b, lock=lock, out=tmp_path / "out").split()
    assert main([*arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "LockError"
    assert "model.safetensors: header changed" in error["seen"]
    assert "modules lm_head: bf16" in error["seen"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["inspect {a} --lock {lock}", "diff {a} {b} --lock {lock}"])
def test_a_checkpoint_that_did_not_move_passes_its_lock(
    sides: tuple[str, str], lock: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = sides
    assert main(words.format(a=a, b=b, lock=lock).split()) in (0, 1)


def test_generate_refuses_a_lock_without_a_model(lock: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--lock", lock]) == 2
    assert "--lock needs a MODEL" in capsys.readouterr().err


def test_load_model_and_llm_refuse_a_checkpoint_that_moved(sides: tuple[str, str], lock: str) -> None:
    import vtensors

    for call in (vtensors.load_model, vtensors.LLM):
        with pytest.raises(vtensors.LockError, match="not the one that was locked"):
            call(sides[1], lock=lock)


def test_two_locks_for_one_side_are_a_usage_error(
    sides: tuple[str, str], lock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *sides, "--lock", lock, "--lock-a", lock]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_many_configuration_keys_are_counted_and_the_telling_ones_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (write_sparse(tmp_path / name, BF16, {"model_type": "of-nobody"}) for name in "ab")
    blocks = [
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head"],
            **{f"k{i}": i for i in range(9)},
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.norm"]},
    ]
    for folder, block in zip((one, two), blocks, strict=True):
        write_json(folder / "config.json", {"model_type": "of-nobody", "quantization_config": block})
    assert main(["diff", str(one), str(two)]) == 1
    out = capsys.readouterr().out
    assert "config.json: quantization_config.quant_algo FP8 -> NVFP4" in out
    assert "config.json: quantization_config.ignore entries +1 (model.norm)" in out
    assert "config.json: quantization_config: 9 more keys differ (see --json)" in out
