"""Whole tiny checkpoints on disk, any module of which can be quantised; and what they give.

Import as `from tiny_models import plain_tensors, nvfp4, write_model`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import vtensors
from tiny_decoders import family_of, tiny_names
from vtensors_formats.nvfp4 import quantize_nvfp4

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
# Names that are their own tensors instead of `<module>.weight`.
_BARE = ("A_log", "dt_bias")


def plain_tensors(
    config: Mapping[str, Any], *, prefix: str = "model.", head: str | None = "lm_head"
) -> dict[str, Tensor]:
    """Every tensor of the model in bfloat16, random from one seed: tensor name -> tensor."""
    generator = torch.Generator().manual_seed(0)
    plan = family_of(config).plan(config, tiny_names(config, head=head))
    tensors = {}
    for name, expected in plan.weights.items():
        value = torch.randn(expected.shape, generator=generator)
        scale = expected.shape[-1] ** -0.5 if len(expected.shape) > 1 else 0.5
        module = head if name == "lm_head" else prefix + name
        suffix = "" if name.endswith(_BARE) else ".weight"
        tensors[f"{module}{suffix}"] = (value * scale).to(torch.bfloat16)
    return tensors


def nvfp4(
    name: str, weight: Tensor, *, publisher: str = "modelopt", shape: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """The module's tensors in NVFP4. publisher: `modelopt` or `compressed-tensors`. shape: of its scalars."""
    made = quantize_nvfp4(weight.float())
    total = made.global_scale
    assert total is not None
    if publisher == "modelopt":
        return {
            f"{name}.weight": made.codes,
            f"{name}.weight_scale": made.block_scale,
            f"{name}.weight_scale_2": total.expand(shape).clone(),
        }
    return {
        f"{name}.weight_packed": made.codes,
        f"{name}.weight_scale": made.block_scale,
        f"{name}.weight_global_scale": (1 / total).expand(shape).clone(),
    }


def fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The module's tensors in FP8 with one scale for the matrix."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}


def quantised(
    tensors: Mapping[str, Tensor], modules: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """A copy where modules are stored otherwise. modules: module name -> its tensors by full name."""
    kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    for own in modules.values():
        kept |= own
    return kept


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    quantization: Mapping[str, Any] | None = None,
    hf_quant: Mapping[str, Any] | None = None,
) -> Path:
    """config.json with the quantization_config, hf_quant_config.json and one file of tensors in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"dtype": "bfloat16", **config}
    if quantization is not None:
        whole["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(whole))
    if hf_quant is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def modelopt_layers(layers: Mapping[str, str]) -> dict[str, Any]:
    """ModelOpt's MIXED_PRECISION block. layers: module -> quant_algo."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            name: {"quant_algo": algorithm, **({"group_size": 16} if "NVFP4" in algorithm else {})}
            for name, algorithm in layers.items()
        },
    }


def load(folder: Path, **options: Any) -> Any:
    """The model on the CPU in float32."""
    return vtensors.load_model(folder, device="cpu", dtype=torch.float32, **options)


def logits(folder: Path, **options: Any) -> Tensor:
    """[1, 8, V] of `IDS`."""
    found: Tensor = load(folder, **options).logits(IDS)
    return found
