"""One matrix in every spelling that the built-in conventions accept, its declaration, and its values by formula.

Import as `from fault_builders import SPELLINGS, write_module, by_formula`. Whole models: see `tiny_models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import vtensors
from builders import write_json, write_safetensors
from builtin_examples import E2M1
from vtensors_formats.nvfp4 import quantize_nvfp4

E4M3 = torch.float8_e4m3fn
NAME = "model.layers.0.mlp.down_proj"
BLOCK = 16
_DTYPES = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_FLOAT = {"type": "float", "symmetric": True, "dynamic": False}


@attrs.frozen(kw_only=True)
class Spelling:
    """How one publisher stores a matrix in one scheme.

    encode: [N, K] float -> suffix -> tensor. algorithm: ModelOpt's word; group: compressed-tensors' arguments;
    neither for transformers' FP8.
    """

    name: str
    scheme: str
    convention: str
    encode: Callable[[Tensor], dict[str, Tensor]]
    algorithm: str = ""
    group: Mapping[str, Any] = attrs.field(factory=dict)

    def stored(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        """The module's tensors by full name."""
        return {f"{module}.{suffix}": tensor for suffix, tensor in self.encode(weight).items()}

    def declaration(self, modules: Iterable[str], others: Iterable[str] = ()) -> dict[str, Any]:
        """The quantization_config that gives the scheme to the modules and leaves the others alone."""
        if self.algorithm:
            layers = {module: {"quant_algo": self.algorithm} for module in modules}
            return {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": layers,
                "weight_block_size": [BLOCK, BLOCK],
            }
        if self.group:
            return compressed(group_0={"targets": list(modules), **self.group})
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK] if self.scheme == "fp8-block" else None,
            "modules_to_not_convert": list(others),
        }


def compressed(*, ignore: Iterable[str] = (), **groups: Mapping[str, Any]) -> dict[str, Any]:
    """A compressed-tensors block with these groups."""
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {name: dict(group) for name, group in groups.items()},
    }


def modelopt_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """Codes, block scale, and a global scale that multiplies."""
    made = quantize_nvfp4(weight.float())
    assert made.global_scale is not None
    return {"weight": made.codes, "weight_scale": made.block_scale, "weight_scale_2": made.global_scale}


def compressed_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """Codes, block scale, and a global scale that divides."""
    made = modelopt_nvfp4(weight)
    return {
        "weight_packed": made["weight"],
        "weight_scale": made["weight_scale"],
        "weight_global_scale": (1 / made["weight_scale_2"]).reshape(1),
    }


def fp8(granularity: str, suffix: str = "weight_scale") -> Callable[[Tensor], dict[str, Tensor]]:
    """Encodes with float32 scales per `tensor`, `row` or `block` of 16 x 16."""

    def encode(weight: Tensor) -> dict[str, Tensor]:
        wide = weight.float()
        if granularity == "tensor":
            scale = wide.abs().max() / 448
            spread = scale
        elif granularity == "row":
            scale = spread = wide.abs().amax(1, keepdim=True) / 448
        else:
            blocks = [
                [part.abs().max() / 448 for part in row.split(BLOCK, 1)] for row in wide.split(BLOCK, 0)
            ]
            scale = torch.tensor([[float(block) for block in row] for row in blocks])
            spread = spread_blocks(scale, wide.shape)
        return {"weight": (wide / spread).to(E4M3), suffix: scale}

    return encode


def spread_blocks(scale: Tensor, shape: Iterable[int], block: int = BLOCK) -> Tensor:
    """A grid of scales repeated over its blocks, cut to [N, K]."""
    n, k = shape
    return scale.repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k]


def by_formula(stored: Mapping[str, Tensor], block: int = BLOCK) -> Tensor:
    """[N, K] float32 of a stored matrix (suffix -> tensor) by the formula of its publisher alone."""
    codes = stored.get("weight_packed", stored.get("weight"))
    assert codes is not None
    if codes.dtype != torch.uint8:
        scale = next(tensor for suffix, tensor in stored.items() if "weight_scale" in suffix).float()
        if scale.numel() > 1 and scale.shape not in ((len(codes),), (len(codes), 1)):
            return codes.float() * spread_blocks(scale, codes.shape, block)
        return codes.float() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(()))
    values = torch.stack((E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]), -1).flatten(1)
    factor = stored["weight_scale"].float()
    if "weight_packed" in stored:
        factor = factor / stored["weight_global_scale"].float()
    else:
        factor = factor * stored["weight_scale_2"].float()
    return values * factor.repeat_interleave(16, 1)


def _group(style: str, activations: Mapping[str, Any] | None, **weights: Any) -> dict[str, Any]:
    return {"format": style, "weights": {**_FLOAT, **weights}, "input_activations": activations}


_TOKEN = {"type": "float", "num_bits": 8, "dynamic": True, "strategy": "token"}
SPELLINGS: dict[str, Spelling] = {
    spelling.name: spelling
    for spelling in (
        Spelling(
            name="modelopt-nvfp4",
            scheme="nvfp4",
            convention="modelopt",
            encode=modelopt_nvfp4,
            algorithm="W4A16_NVFP4",
        ),
        Spelling(
            name="compressed-nvfp4",
            scheme="nvfp4",
            convention="compressed-tensors",
            encode=compressed_nvfp4,
            group=_group("nvfp4-pack-quantized", None, num_bits=4, strategy="tensor_group", group_size=16),
        ),
        *(
            Spelling(
                name=f"modelopt-fp8-{size}",
                scheme=f"fp8-{size}",
                convention="modelopt",
                encode=fp8(size),
                algorithm=algorithm,
            )
            for size, algorithm in (
                ("tensor", "FP8"),
                ("row", "FP8_PER_CHANNEL_PER_TOKEN"),
                ("block", "FP8_PB_WO"),
            )
        ),
        *(
            Spelling(
                name=f"compressed-fp8-{size}",
                scheme=f"fp8-{size}",
                convention="compressed-tensors",
                encode=fp8(size),
                group=_group("float-quantized", _TOKEN, num_bits=8, strategy=strategy, **more),
            )
            for size, strategy, more in (
                ("tensor", "tensor", {}),
                ("row", "channel", {}),
                ("block", "block", {"block_structure": [BLOCK, BLOCK]}),
            )
        ),
        *(
            Spelling(
                name=f"hf-fp8-{size}",
                scheme=f"fp8-{size}",
                convention="hf-fp8",
                encode=fp8(size, "weight_scale_inv"),
            )
            for size in ("tensor", "block")
        ),
    )
}
NVFP4 = ("modelopt-nvfp4", "compressed-nvfp4")

# --- files --------------------------------------------------------------------------------------------------


def stored_as(tensor: Tensor, dtype: str | None = None) -> tuple[str, tuple[int, ...], bytes]:
    """dtype name, shape and bytes of a tensor. dtype: another name for the same bytes, such as F8_E8M0."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return dtype or _DTYPES[tensor.dtype], tuple(tensor.shape), bytes(raw.tolist())


def write_module(
    folder: Path,
    tensors: Mapping[str, Tensor | tuple[str, tuple[int, ...], bytes]],
    quantization: Mapping[str, Any] | None,
    *,
    module: str = NAME,
) -> vtensors.Checkpoint:
    """The opened checkpoint of one module, for no architecture. tensors: suffix -> tensor."""
    files = {
        f"{module}.{suffix}": stored_as(tensor) if isinstance(tensor, Tensor) else tensor
        for suffix, tensor in tensors.items()
    }
    write_safetensors(folder / "model.safetensors", files)
    config: dict[str, Any] = {"model_type": "of-nobody"}
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    write_json(folder / "config.json", config)
    return vtensors.open_checkpoint(folder)


def read_module(folder: Path, tensors: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> Tensor:
    """[N, K] float32 as vtensors reads the module, the checkpoint checked as a load does."""
    checkpoint = write_module(folder, tensors, quantization)
    checkpoint.check()
    weight: Any = checkpoint.read(NAME)
    values: Tensor = weight.dequantize(torch.float32)
    return values
