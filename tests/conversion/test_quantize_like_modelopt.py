"""Quantising the publisher's BF16 model gives the publisher's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conversion.stored import run, stored_tensors
from vtensors import open_checkpoint

# ModelOpt shares the largest magnitude over fused inputs for NVFP4 and not for FP8.
CASES = {
    "nvfp4": ("qwen35-modelopt-w4a16nvfp4", ["--share-scales"], set()),
    "fp8-tensor": ("qwen35-modelopt-fp8", [], {"input_scale"}),
    "fp8-row": ("qwen35-modelopt-fp8-pcpt", [], set()),
    "fp8-block": ("qwen35-modelopt-fp8-block", [], set()),
    "mxfp8": ("qwen35-modelopt-mxfp8", [], set()),
}


@pytest.mark.parametrize("recipe", CASES)
def test_every_tensor_is_the_publishers(recipe: str, shared: Path, tmp_path: Path, capsys: Any) -> None:
    name, options, uncalibrated = CASES[recipe]
    source = shared / "checkpoints" / "qwen35-transformers-bf16"
    status, _ = run(capsys, "quantize", source, tmp_path / "out", "--recipe", recipe, *options)
    assert status == 0
    ours, theirs = stored_tensors(tmp_path / "out"), stored_tensors(shared / "checkpoints" / name)
    missing = {tensor.rpartition(".")[2] for tensor in theirs.keys() - ours.keys()}
    assert missing == uncalibrated
    assert ours.keys() <= theirs.keys()
    assert [tensor for tensor in ours if ours[tensor] != theirs[tensor]] == []


@pytest.mark.parametrize("recipe", CASES)
def test_the_declaration_is_the_publishers(recipe: str, shared: Path, tmp_path: Path, capsys: Any) -> None:
    name, options, _ = CASES[recipe]
    source = shared / "checkpoints" / "qwen35-transformers-bf16"
    run(capsys, "quantize", source, tmp_path / "out", "--recipe", recipe, *options)
    ours, theirs = open_checkpoint(tmp_path / "out"), open_checkpoint(shared / "checkpoints" / name)
    assert ours.conflicts == ours.warnings == ()
    assert {n: (m.scheme, m.algorithm) for n, m in ours.modules.items()} == {
        n: (m.scheme, m.algorithm) for n, m in theirs.modules.items()
    }


def test_without_shared_scales_fused_partners_differ_and_nothing_else(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    source = shared / "checkpoints" / "qwen35-transformers-bf16"
    run(capsys, "quantize", source, tmp_path / "out", "--recipe", "nvfp4")
    ours = stored_tensors(tmp_path / "out")
    theirs = stored_tensors(shared / "checkpoints" / "qwen35-modelopt-w4a16nvfp4")
    differing = {tensor.split(".")[-2] for tensor in ours if ours[tensor] != theirs[tensor]}
    assert differing == {"in_proj_z", "up_proj", "gate_proj", "k_proj", "v_proj"}


def test_in_float32_arithmetic_fp8_scales_are_the_publishers_and_some_codes_are_not(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    source = shared / "checkpoints" / "qwen35-transformers-bf16"
    options = ("--recipe", "fp8-tensor", "--arithmetic", "float32")
    run(capsys, "quantize", source, tmp_path / "out", *options)
    ours = stored_tensors(tmp_path / "out")
    theirs = stored_tensors(shared / "checkpoints" / "qwen35-modelopt-fp8")
    differing = [tensor for tensor in ours if ours[tensor] != theirs[tensor]]
    assert len(differing) == 23
    assert all(tensor.endswith(".weight") for tensor in differing)


def test_fp8_rows_for_compressed_tensors_are_llm_compressors(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    source = shared / "checkpoints" / "qwen35-transformers-bf16"
    options = ("--recipe", "fp8-row", "--to", "compressed-tensors")
    assert run(capsys, "quantize", source, tmp_path / "out", *options)[0] == 0
    ours = stored_tensors(tmp_path / "out")
    theirs = stored_tensors(shared / "checkpoints" / "qwen35-llmcompressor-fp8dynamic")
    # llm-compressor itself changes the norms: it adds one in BF16 and takes it off again.
    differing = [tensor for tensor in ours if ours[tensor] != theirs[tensor]]
    assert ours.keys() == theirs.keys()
    assert all(tensor.endswith("norm.weight") for tensor in differing)
