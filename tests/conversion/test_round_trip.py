"""ModelOpt -> compressed-tensors -> ModelOpt, and the reverse, over the publishers' own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conversion.stored import run, stored_tensors
from vtensors import open_checkpoint

ROOT = Path(__file__).resolve().parents[3] / "shared" / "checkpoints"
GLOBALS = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
OTHER = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}


def _nvfp4_directories() -> Iterator[Path]:
    for path in sorted(ROOT.iterdir()) if ROOT.is_dir() else ():
        config = path / "config.json"
        block = json.loads(config.read_text()).get("quantization_config") if config.exists() else None
        text = json.dumps(block or {}).upper()
        if "NVFP4" in text:
            yield path


DIRECTORIES = list(_nvfp4_directories())
REFUSED = {"qwen35-modelopt-nvfp4-awqlite": "pre_quant_scale"}


@pytest.mark.parametrize("path", DIRECTORIES, ids=[path.name for path in DIRECTORIES])
def test_there_and_back_gives_the_same_codes_block_scales_and_modules(
    path: Path, tmp_path: Path, capsys: Any
) -> None:
    source = open_checkpoint(path)
    quantized = [m for m in source.modules.values() if m.convention != "plain"]
    own = quantized[0].convention
    there, back = tmp_path / "there", tmp_path / "back"

    status, report = run(capsys, "convert", path, there, "--to", OTHER[own])
    if path.name in REFUSED:
        assert status == 2
        assert REFUSED[path.name] in report["error"]["message"]
        assert report["error"]["tensor"]
        assert not list(tmp_path.iterdir())
        return
    assert status == 0
    assert report["reciprocals"]["largest_ulps"] <= 1
    assert run(capsys, "convert", there, back, "--to", own)[0] == 0

    before, after = stored_tensors(path), stored_tensors(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        found = after[name]
        if tensor.dtype == "F32" and name.endswith(GLOBALS):
            assert found.shape == tensor.shape
            assert abs(found.bits[0] - tensor.bits[0]) <= 1, name
        elif (tensor.dtype, found.dtype) == ("BF16", "F32"):  # a BF16 scale of FP8, widened exactly
            assert found.data[2::4] + found.data[3::4] == tensor.data[0::2] + tensor.data[1::2], name
        else:
            assert found == tensor, name

    for folder in (there, back):
        other = open_checkpoint(folder)
        assert other.conflicts == ()
        assert other.accounting.problems == ()
        assert other.warnings == source.warnings
        assert (other.kv_cache.algorithm if other.kv_cache else None) == (
            source.kv_cache.algorithm if source.kv_cache else None
        )
        assert {name: (m.scheme, m.declared) for name, m in other.modules.items()} == {
            name: (m.scheme, m.declared) for name, m in source.modules.items()
        }
        assert other.kv_scales().keys() == source.kv_scales().keys()
        for name, scales in source.kv_scales().items():
            assert (other.kv_scales()[name].k, other.kv_scales()[name].v) == (scales.k, scales.v)


def test_the_directories_are_there(shared: Path) -> None:
    assert len(DIRECTORIES) >= 23
