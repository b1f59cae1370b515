"""Complete small checkpoints on disk, in any of the conventions, with one thing changed on the way.

Import as `from tiny_checkpoints import Tiny`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiny_decoders import family_of, tiny_config, tiny_names
from vtensors_formats.nvfp4 import quantize_nvfp4

_PARTNERS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "in_proj_qkv": "qkvz",
    "in_proj_z": "qkvz",
}
_ALONE = ("o_proj", "down_proj", "out_proj")
_IGNORED = ("in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate")
_NVFP4_ARGS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}


@attrs.define
class Tiny:
    """tensors: by name, as they will be stored. config: config.json. plain: the weights before quantizing."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    plain: dict[str, Tensor]

    @classmethod
    def plain_model(cls, family: str = "llama", *, seed: int = 0, **changes: Any) -> Self:
        """A BF16 model of one of the families of `tiny_decoders`, with gains as trained ones are."""
        config = tiny_config(family, dtype="bfloat16", **changes)
        tied = bool(config.get("tie_word_embeddings"))
        plan = family_of(config).plan(config, tiny_names(config, head=None if tied else "lm_head"))
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for expected in plan.weights.values():
            values = torch.randn(expected.shape, generator=generator) * 0.05
            last = expected.module.rpartition(".")[2]
            if "norm" in last and not (
                config["model_type"].startswith("qwen3_5")
                and not expected.module.endswith("linear_attn.norm")
            ):
                values = values + 1
            name = expected.module if last in ("A_log", "dt_bias") else f"{expected.module}.weight"
            tensors[name] = values.bfloat16()
        return cls(tensors=tensors, config=config, plain=dict(tensors))

    @classmethod
    def modelopt(cls, algorithm: str = "NVFP4", family: str = "llama", **more: Any) -> Self:
        """The model with its linears in NVFP4, W4A16_NVFP4 or FP8, as ModelOpt writes them."""
        tiny = cls.plain_model(family)
        tiny.config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "ignore": ["lm_head"],
            **more,
        }
        tiny._quantize(_modelopt_fp8 if algorithm == "FP8" else _modelopt_nvfp4)
        return tiny

    @classmethod
    def compressed(cls, family: str = "llama") -> Self:
        """The model with its linears in NVFP4 (W4A4), as compressed-tensors writes them."""
        tiny = cls.plain_model(family)
        activations = {**_NVFP4_ARGS, "dynamic": "local"}
        tiny.config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _NVFP4_ARGS,
                    "input_activations": activations,
                    "format": "nvfp4-pack-quantized",
                }
            },
        }
        tiny._quantize(_compressed_nvfp4)
        return tiny

    def _quantize(self, encode: Callable[[Tensor, float], dict[str, Tensor]]) -> None:
        modules = (name.removesuffix(".weight") for name in self.plain)
        self.config["quantization_config"]["ignore"] += [m for m in modules if m.endswith(_IGNORED)]
        amax: dict[str, float] = {}
        for name, tensor in self.plain.items():
            group = _group(name)
            if group:
                amax[group] = max(amax.get(group, 0.0), float(tensor.float().abs().max()))
        for name, tensor in self.plain.items():
            group = _group(name)
            if group:
                del self.tensors[name]
                module = name.removesuffix(".weight")
                parts = encode(tensor.float(), amax[group])
                self.tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}

    def save(self, folder: Path, *, shards: int = 1, metadata: dict[str, str] | None = None) -> Path:
        """Write the checkpoint into a new folder and return that; more than one shard get an index."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
        if shards == 1:
            save_file(tensors, folder / "model.safetensors", metadata=metadata)
            return folder
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            own = dict(list(tensors.items())[number::shards])
            save_file(own, folder / file)
            weight_map |= dict.fromkeys(own, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder


def _group(name: str) -> str:
    """Which linears share their scales: `` for what stays BF16."""
    owner, _, last = name.removesuffix(".weight").rpartition(".")
    if last in _PARTNERS:
        return f"{owner}.{_PARTNERS[last]}"
    return name if last in _ALONE else ""


def _modelopt_nvfp4(values: Tensor, amax: float) -> dict[str, Tensor]:
    weight = quantize_nvfp4(values, torch.tensor(amax / 2688))
    scale = weight.global_scale
    assert scale is not None
    return {
        "weight": weight.codes,
        "weight_scale": weight.block_scale,
        "weight_scale_2": scale,
        "input_scale": torch.tensor(0.003),
    }


def _compressed_nvfp4(values: Tensor, amax: float) -> dict[str, Tensor]:
    weight = quantize_nvfp4(values, torch.tensor(amax / 2688))
    return {
        "weight_packed": weight.codes,
        "weight_scale": weight.block_scale,
        "weight_global_scale": torch.tensor([2688 / amax]),
        "input_global_scale": torch.tensor([300.0]),
    }


def _modelopt_fp8(values: Tensor, amax: float) -> dict[str, Tensor]:
    scale = torch.tensor(amax / 448)
    codes = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
