"""Device memory of a load: what stays is the file's, and the peak is one group of layers above it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tiny_models import modelopt_layers, nvfp4, plain_tensors, quantised, write_model

import vtensors
from tiny_decoders import tiny_config

pytestmark = pytest.mark.gpu

HIDDEN, WIDE, LAYERS = 1024, 4096, 4
# Room for the allocator's rounding and for the workspaces of a few small tensors.
SLACK = 4 << 20


def _checkpoint(folder: Path) -> Path:
    config = tiny_config("llama", hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS)
    tensors = plain_tensors(config)
    names = [f"model.layers.{i}.mlp.{part}_proj" for i in range(LAYERS) for part in ("gate", "up", "down")]
    own = {name: nvfp4(name, tensors[f"{name}.weight"]) for name in names}
    return write_model(
        folder, config, quantised(tensors, own), quantization=modelopt_layers(dict.fromkeys(names, "NVFP4"))
    )


@pytest.mark.fault("B91")
def test_a_load_needs_no_more_than_what_stays_and_one_group_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_CACHE_DIR", str(tmp_path / "cache"))
    folder = _checkpoint(tmp_path / "m")
    # The first load compiles and tests the kernels; memory is that of a later one.
    vtensors.load_model(folder, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = vtensors.load_model(folder, device="cuda")
    gc.collect()
    stays, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    stored = (folder / "model.safetensors").stat().st_size
    largest = 2 * (2 * HIDDEN * WIDE * 9 // 16)  # gate and up, as stored and packed
    used = {name for record in model.selected for *_, name in record.kernels}
    print(f"file {stored} B, stays {stays} B, peak {peak} B, largest group {largest} B; {sorted(used)}")
    assert any(name.endswith("_nvfp4_stream") for name in used)
    assert stays <= 1.02 * stored + SLACK
    assert peak <= stays + largest + SLACK
