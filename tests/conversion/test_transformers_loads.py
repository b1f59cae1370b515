"""Converted compressed-tensors checkpoints in transformers with compressed-tensors, where both are installed."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conversion.stored import run
from vtensors import open_checkpoint

pytestmark = pytest.mark.slow

NAMES = (
    "qwen35-modelopt-w4a16nvfp4",
    "qwen35-modelopt-nvfp4-kvfp8",
    "llama-modelopt-nvfp4-kvfp8",
    "qwen3-modelopt-nvfp4-kvfp8",
    "qwen35-modelopt-mixed-w4a16mlp-fp8attn",
)
# compressed-tensors decompresses to BF16 by way of BF16 scales: three roundings of 2^-9 each.
WEIGHT_TOLERANCE = 3 * 2.0**-9
# What these roundings do to the logits of models with random weights (llm-compressor's own file: 0.019).
LOGIT_TOLERANCE = 0.03


def _weight_only(folder: Path) -> None:
    """Leave activations and the KV cache alone, as the oracle's logits do."""
    config = json.loads((folder / "config.json").read_text())
    block = config["quantization_config"]
    block["kv_cache_scheme"] = None
    for group in block["config_groups"].values():
        group["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_logits_are_those_of_the_source(
    name: str, shared: Path, tmp_path: Path, capsys: Any
) -> None:
    for library in ("transformers", "compressed_tensors"):
        pytest.importorskip(library)
    transformers = importlib.import_module("transformers")
    load_file = importlib.import_module("safetensors.torch").load_file
    source = shared / "checkpoints" / name
    oracle = load_file(source / "oracle" / "tensors.safetensors")
    out = tmp_path / "out"
    assert run(capsys, "convert", source, out, "--to", "compressed-tensors")[0] == 0
    shutil.copytree(out, tmp_path / "weights")
    _weight_only(tmp_path / "weights")

    load = transformers.AutoModelForCausalLM.from_pretrained
    _, info = load(out, dtype=torch.bfloat16, output_loading_info=True)
    assert info["missing_keys"] in ([], set())
    strangers = {key for key in info["unexpected_keys"] if not key.endswith((".k_scale", ".v_scale"))}
    # An input scale beside weight-only modules is kept (--drop-unused-scales leaves it out).
    assert strangers == set()

    model = load(tmp_path / "weights", dtype=torch.float32).eval()
    with torch.inference_mode():
        with contextlib.suppress(RuntimeError):  # decompresses, to BF16, which the float32 model then refuses
            model(oracle["input_ids"])
        torch.nn.Module.float(model)
        checkpoint = open_checkpoint(source)
        for module, record in checkpoint.modules.items():
            if record.convention == "modelopt":
                wanted = checkpoint.read(module).dequantize(torch.float32)
                found = model.get_submodule(module).weight
                assert bool(((found - wanted).abs() <= WEIGHT_TOLERANCE * wanted.abs()).all()), module
        logits = model(oracle["input_ids"]).logits
    error = (logits - oracle["logits"]).abs().max() / oracle["logits"].abs().max()
    assert float(error) <= LOGIT_TOLERANCE
