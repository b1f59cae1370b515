"""Whole models whose linears are all quantised but those that an ignore list, or the test, leaves alone.

Import as `from declared_models import CONVENTIONS, every_linear, write, opened`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fault_builders import SPELLINGS, compressed
from tiny_models import plain_tensors, quantised, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config

CONFIG = tiny_config("llama")
TENSORS = plain_tensors(CONFIG)
CONVENTIONS = {
    "modelopt": SPELLINGS["modelopt-nvfp4"],
    "compressed-tensors": SPELLINGS["compressed-nvfp4"],
    "hf-fp8": SPELLINGS["hf-fp8-tensor"],
}


def every_linear(convention: str, ignore: Iterable[str]) -> dict[str, Any]:
    """The block that quantises all linears but those ignored."""
    if convention == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": list(ignore)}
    if convention == "hf-fp8":
        return {"quant_method": "fp8", "modules_to_not_convert": list(ignore)}
    group = {"targets": ["Linear"], **CONVENTIONS[convention].group}
    return compressed(ignore=ignore, group_0=group)


def write(
    folder: Path,
    convention: str,
    block: Mapping[str, Any],
    *,
    plain: Iterable[str] = (),
    extra: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] = CONFIG,
    tensors: Mapping[str, Tensor] = TENSORS,
) -> Path:
    """A model whose linears are all quantised but those in plain, lm_head and extra."""
    names = [n.removesuffix(".weight") for n in tensors if "_proj" in n]
    own = {
        name: CONVENTIONS[convention].stored(name, tensors[f"{name}.weight"].float())
        for name in names
        if name not in set(plain)
    }
    return write_model(folder, config, {**quantised(tensors, own), **(extra or {})}, quantization=block)


def opened(folder: Path) -> vtensors.Checkpoint:
    """The checkpoint, accepted by a load."""
    checkpoint = vtensors.open_checkpoint(folder)
    checkpoint.check()
    return checkpoint
