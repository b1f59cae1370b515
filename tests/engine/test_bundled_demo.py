"""The bundled checkpoint: the demo's tokens, the switches, the head, the FP8 cache."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vtensors
from vtensors.errors import RequestError
from vtensors_engine.bundled import bundled_checkpoint

# The first 24 tokens of `vtensors generate` without arguments: temperature 0.8, seed 1611.
DEMO_TOKENS = [
    271,
    261,
    1037,
    271,
    392,
    938,
    414,
    271,
    434,
    16,
    201,
    298,
    1680,
    488,
    281,
    390,
    322,
    392,
    938,
    261,
    410,
    271,
    565,
    68,
]


def _cli(*args: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "vtensors", *args], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_generate_without_a_model_writes_the_same_verse_everywhere() -> None:
    report = _cli("generate", "--device", "cpu", "--json", "--max-tokens", "24")
    (completion,) = report["completions"]
    assert completion["token_ids"] == DEMO_TOKENS
    assert completion["text"].isprintable() or "\n" in completion["text"]
    rows = {row["scheme"]: (row["declared"], row["executed"]) for row in report["executed"]}
    assert rows["nvfp4"] == ("16bit", "16bit")
    assert rows["fp8-tensor"] == ("fp8-static", "16bit")


def test_the_switch_for_fp8_activations_runs_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(16)[None]
    declared = vtensors.load_model(bundled_checkpoint(), device="cpu", activations="declared").logits(ids)
    monkeypatch.setenv("VT_FP8_W8A8", "1")
    switched = vtensors.load_model(bundled_checkpoint(), device="cpu")
    assert torch.equal(switched.logits(ids), declared)
    assert {row["executed"] for row in switched.executed_summary()} == {"16bit", "fp8-static"}


def test_the_head_dequantised_at_load_gives_the_same_logits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(16)[None]
    kept = vtensors.load_model(bundled_checkpoint(), device="cpu").logits(ids)
    monkeypatch.setenv("VT_LMHEAD_QUANTIZED", "0")
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        plain = vtensors.load_model(bundled_checkpoint(), device="cpu").logits(ids)
    assert torch.allclose(kept, plain, rtol=1e-5, atol=1e-5)
    assert "VT_LMHEAD_QUANTIZED=0" in caplog.text


def test_an_fp8_cache_without_scales_says_so_and_stays_close(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.arange(3, 40)[None]
    exact = vtensors.load_model(bundled_checkpoint(), device="cpu").logits(ids)
    assert "k_scale" not in caplog.text
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        rounded = vtensors.load_model(bundled_checkpoint(), device="cpu", kv_cache_dtype="fp8").logits(ids)
    assert caplog.text.count("no k_scale / v_scale; 1.0 is used") == 1
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 2]],
        torch.tensor([1, 2]),
        torch.tensor([[1.0, 2.0]]),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor([[2048]]),
    ],
)
def test_logits_of_what_is_no_batch_of_token_ids_are_refused(ids: Any) -> None:
    model = vtensors.load_model(bundled_checkpoint(), "cpu", torch.float32)
    with pytest.raises(RequestError):
        model.logits(ids)


def _copied(folder: Path) -> Path:
    shutil.copytree(bundled_checkpoint(), folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def test_a_file_truncated_under_a_loaded_model_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    model = vtensors.load_model(_copied(tmp_path / "model"), device="cpu")
    ids = torch.arange(4)[None]
    model.logits(ids)
    os.truncate(tmp_path / "model" / "model.safetensors", 100_000)
    with pytest.raises(vtensors.CheckpointError, match="changed while open") as caught:
        model.logits(ids)
    assert "model.safetensors" in str(caught.value)
    with pytest.raises(vtensors.CheckpointError, match="changed while open"):
        model.step(ids[0], model.new_state())


def test_a_model_whose_files_are_deleted_or_replaced_goes_on_with_what_it_mapped(tmp_path: Path) -> None:
    model = vtensors.load_model(_copied(tmp_path / "model"), device="cpu")
    ids = torch.arange(4)[None]
    before = model.logits(ids)
    (tmp_path / "other").write_bytes(b"something else")
    os.replace(tmp_path / "other", tmp_path / "model" / "model.safetensors")
    assert torch.equal(model.logits(ids), before)
    shutil.rmtree(tmp_path / "model")
    assert torch.equal(model.logits(ids), before)
