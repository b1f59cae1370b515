"""Damaged files and new dtypes: `inspect` and a load give one answer, with the file, the tensor and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import load

import vtensors
from builders import Tensors, header_bytes, safetensors_bytes, write_json, write_safetensors
from tiny_decoders import tiny_config
from vtensors.cli import main
from vtensors.errors import CheckpointError, VtensorsError
from vtensors.inspection import inspection

ONE: Tensors = {"model.norm.weight": ("BF16", (4,), bytes(8))}
WHOLE = safetensors_bytes(ONE)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 99\n"
DAMAGED = {
    "extra-bytes": (WHOLE + bytes(16), "16"),
    "header-too-long": ((10**9).to_bytes(8, "little") + b"{}", "1000000000"),
    "not-json": (header_bytes(b"{not json") + bytes(8), "JSON"),
    "empty": (b"", "empty"),
    "git-lfs": (LFS, "git lfs pull"),
}


@pytest.mark.fault("B59")
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_gets_the_same_answer_from_inspect_and_load(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, says = DAMAGED[kind]
    (tmp_path / "model.safetensors").write_bytes(data)
    write_json(tmp_path / "config.json", {**tiny_config("llama"), "dtype": "bfloat16"})
    with pytest.raises(CheckpointError) as at_load:
        load(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)["error"]
    refusal = at_load.value
    assert (told["message"], told["file"], told["seen"]) == (refusal.problem, refusal.file, refusal.seen)
    assert (told["accepted"], told["fix"]) == (refusal.accepted, refusal.fix)
    assert "model.safetensors" in str(at_load.value)
    assert says in str(at_load.value)


@pytest.mark.fault("B61")
def test_new_dtypes_are_shown_by_inspect_and_refused_at_load_by_tensor_and_dtype(tmp_path: Path) -> None:
    new: Tensors = {
        "a.weight": ("F4", (2, 8), bytes(8)),
        "b.weight": ("F8_E8M0", (3,), bytes(3)),
        "c.weight": ("F6", (4,), bytes(3)),
    }
    write_safetensors(tmp_path / "model.safetensors", new)
    write_json(tmp_path / "config.json", {"model_type": "of-nobody"})
    checkpoint = vtensors.open_checkpoint(tmp_path)
    report = inspection(checkpoint)
    assert set(report["unclaimed"]) == set(new)
    told = "\n".join(report["problems"])
    assert all(f"{dtype} {list(shape)}" in told for dtype, shape, _ in new.values())
    with pytest.raises(VtensorsError) as caught:
        checkpoint.check()
    assert "a.weight" in str(caught.value)
    assert "F4 [2, 8]" in str(caught.value)
