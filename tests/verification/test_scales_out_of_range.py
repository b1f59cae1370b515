"""Scales that make weights infinite: `verify` lists them where a load refuses them, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

import vtensors
from edited_checkpoints import Tensors, edited
from verify_tools import found, run
from vtensors.errors import WeightValueError

DATA = Path(__file__).resolve().parents[1] / "data"
MODULE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("checkpoint", "suffix", "legal", "beyond"),
    [
        ("qwen3-modelopt-nvfp4-kvfp8", "weight_scale_2", 2.0**116, 2.0**117),
        ("llama-llmcompressor-nvfp4a16", "weight_global_scale", 2.0**-116, 2.0**-117),
        ("qwen3-transformers-fp8block", "weight_scale_inv", 2.0**119, 2.0**120),
    ],
)
def test_a_scale_is_out_of_range_for_verify_where_a_load_refuses_it(
    tmp_path: Path, checkpoint: str, suffix: str, legal: float, beyond: float
) -> None:
    name = f"{MODULE}.{suffix}"

    def with_scale(value: float) -> Path:
        def change(tensors: Tensors) -> None:
            tensors[name].view(-1)[-1] = value

        return edited(DATA / checkpoint, tmp_path / repr(value), change)

    folder = with_scale(legal)
    assert found(run(folder), "scale-out-of-range") == []
    vtensors.open_checkpoint(folder).read(MODULE)
    folder = with_scale(beyond)
    assert [finding.tensor for finding in found(run(folder), "scale-out-of-range")] == [name]
    with pytest.raises(WeightValueError, match="infinite in float32"):
        vtensors.open_checkpoint(folder).read(MODULE)
