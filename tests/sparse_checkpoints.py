"""Checkpoints of true names, dtypes and shapes whose bytes all read as zero: sparse files of any size.

Import as `from sparse_checkpoints import write_sparse` (tests/ is on pytest's pythonpath).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from builders import header_bytes, write_json

# name -> (safetensors dtype, shape)
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]

_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
REPOSITORY_27B = "nvidia--Qwen3.6-27B-NVFP4"


def write_sparse(
    folder: Path, tensors: Shapes, config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None
) -> Path:
    """Write model.safetensors as a sparse file and the configurations beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + _BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    blob = header_bytes(header)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(blob)
        stream.truncate(len(blob) + offset)
    write_json(folder / "config.json", config)
    if hf_quant is not None:
        write_json(folder / "hf_quant_config.json", hf_quant)
    return folder


def published_27b(
    shared: Path,
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, Any], dict[str, Any]]:
    """Tensors, config.json and hf_quant_config.json of the published 27B NVFP4 repository."""
    manifest = json.loads(gzip.decompress((shared / "manifests" / f"{REPOSITORY_27B}.json.gz").read_bytes()))
    tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in manifest["tensors"].items()}
    config, hf_quant = (
        json.loads((shared / "configs" / f"{REPOSITORY_27B}_{name}").read_text())
        for name in ("config.json", "hf_quant_config.json")
    )
    return tensors, config, hf_quant


def with_head(
    published: tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, Any], dict[str, Any]], scheme: str
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, Any], dict[str, Any]]:
    """The published checkpoint with lm_head as BF16 (`bf16`, excluded) or as FP8 per row (`fp8-row`)."""
    tensors, config, hf_quant = json.loads(json.dumps(published))
    kept = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items() if "lm_head" not in name}
    rows, half = published[0]["lm_head.weight"][1]
    if scheme == "bf16":
        kept["lm_head.weight"] = ("BF16", (rows, 2 * half))
    else:
        kept["lm_head.weight"] = ("F8_E4M3", (rows, 2 * half))
        kept["lm_head.weight_scale"] = ("F32", (rows,))
    for block, excluded in (
        (config["quantization_config"], "ignore"),
        (hf_quant["quantization"], "exclude_modules"),
    ):
        del block["quantized_layers"]["lm_head"]
        if scheme == "bf16":
            block[excluded].append("lm_head")
        else:
            block["quantized_layers"]["lm_head"] = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [name for name in group["targets"] if name != "lm_head"]
    return kept, config, hf_quant
