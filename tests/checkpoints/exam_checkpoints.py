"""The checkpoints that kernels are examined on: those of tests/data, and some made of them for schemes that these lack.

Import as `from exam_checkpoints import EXAMS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from oracle_cases import DATA, Case, all_cases
from safetensors.torch import load_file
from torch import Tensor

from edited_checkpoints import Tensors, edited
from vtensors.checkpoint import open_checkpoint
from vtensors.cli import main
from vtensors_plugins.architectures.groups import PlannedGroup
from vtensors_plugins.architectures.outline import outline

# Tokens of the input that a made checkpoint is run on.
_ROWS, _LENGTH = 2, 24


@attrs.frozen(kw_only=True)
class Exam:
    """One checkpoint. make: folder -> its path. case: with its oracle, None for a made one.

    mixture: routers choose experts, so that single tokens may differ by one expert.
    """

    name: str
    make: Callable[[Path], Path]
    case: Case | None = None
    mixture: bool = False

    def ids(self) -> Tensor:
        """[2, T] int64: the oracle's, or made up."""
        if self.case is None:
            return torch.arange(_ROWS * _LENGTH).reshape(_ROWS, _LENGTH) * 7 % 500
        return load_file(self.case.oracle_folder / "tensors.safetensors")["input_ids"]


def _of(case: Case) -> Exam:
    return Exam(name=case.name, make=lambda _folder: case.path, case=case, mixture="moe" in case.name)


def _quantized(source: str, recipe: str) -> Callable[[Path], Path]:
    """A checkpoint of the tests made plain, and quantized by a recipe of `vtensors quantize`."""

    def make(folder: Path) -> Path:
        (case,) = [case for case in all_cases() if case.name == source]
        plain, out = folder / "plain", folder / "quantized"
        for words in (
            ["convert", case.path, plain, "--to", "plain:bf16"],
            ["quantize", plain, out, "--recipe", recipe],
        ):
            if status := main([*map(str, words), "--json"]):
                raise RuntimeError(f"{words} ended with {status}")
        return out

    return make


def _w4a8(folder: Path) -> Path:
    """An NVFP4 checkpoint that declares FP8 activations: its scales are of amax / 448 instead of amax / (6 * 448)."""

    def change(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("input_scale"):
                tensors[name] *= 6

    path = edited(DATA / "llamazero-modelopt-nvfp4", folder / "w4a8", change)
    (path / "hf_quant_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    block = config["quantization_config"]
    block["quant_algo"] = "W4A8_NVFP4_FP8"
    block["config_groups"]["group_0"]["input_activations"] = {
        "dynamic": False,
        "num_bits": 8,
        "type": "float",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


_DENSE, _MIXTURE = "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn", "qwen35moe-modelopt-moe-mixed-w4a16"
STORED = tuple(_of(case) for case in all_cases() if DATA in case.oracle_folder.parents)
MADE = (
    Exam(name="dense-mxfp8", make=_quantized(_DENSE, "mxfp8")),
    Exam(name="dense-fp8-block", make=_quantized(_DENSE, "fp8-block")),
    Exam(name="llama-w4a8", make=_w4a8),
    Exam(name="experts-fp8-row", make=_quantized(_MIXTURE, "fp8-row"), mixture=True),
    Exam(name="experts-fp8-block", make=_quantized(_MIXTURE, "fp8-block"), mixture=True),
)
EXAMS = (*STORED, *MADE)


def groups_of(path: Path, activations: str, dtype: str = "bfloat16") -> tuple[PlannedGroup, ...]:
    """What an H100 or H200 would be asked for, and the kernels that would serve it under the switches that are set."""
    return outline(
        open_checkpoint(path),
        device="cuda:0",
        capability=(9, 0),
        dtype=dtype,
        activations=activations,
        assumed=True,
    )
