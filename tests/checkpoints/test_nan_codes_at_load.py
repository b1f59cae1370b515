"""A load refuses FP8 codes that are NaN, whatever the scheme, and names the tensor and the place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exam_checkpoints import EXAMS

import vtensors
from edited_checkpoints import Tensors, edited

# Checkpoint with FP8 weights by tensor, row, block and group of 32.
CASES = (
    "qwen35-llmcompressor-fp8static-kvfp8",
    "qwen35-llmcompressor-mixed",
    "llamaedge-llmcompressor-fp8block",
    "dense-mxfp8",
)
PLACE = (3, 17)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("name", CASES)
def test_a_code_that_is_nan_is_refused_at_load_with_its_place(name: str, byte: int, tmp_path: Path) -> None:
    (exam,) = [exam for exam in EXAMS if exam.name == name]
    changed: list[str] = []

    def change(tensors: Tensors) -> None:
        tensor = next(
            key
            for key, value in tensors.items()
            if value.dtype == torch.float8_e4m3fn and value.numel() > 1000
        )
        tensors[tensor].view(torch.uint8)[PLACE] = byte
        changed.append(tensor)

    path = edited(exam.make(tmp_path), tmp_path / "nan", change)
    with pytest.raises(vtensors.WeightValueError) as refused:
        vtensors.load_model(path, device="cpu", activations="16bit")
    told = str(refused.value)
    assert changed[0] in told
    assert "NaN" in told
    assert str(list(PLACE)) in told
