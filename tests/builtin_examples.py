"""Tiny checkpoints in the built-in conventions with the values that each must read as, by its own formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
N, K = 48, 64
# OCP Microscaling Formats v1.0: the value of each E2M1 code.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@attrs.frozen(kw_only=True, eq=False)
class Module:
    """A module as stored. tensors: suffix -> tensor; expected: its weight [N, K] float32."""

    tensors: dict[str, Tensor]
    expected: Tensor


def write(folder: Path, modules: dict[str, Module], quantization: dict[str, Any] | None) -> dict[str, Tensor]:
    """Write config.json and model.safetensors: the modules and a bfloat16 head; the modules' values."""
    tensors = {"lm_head.weight": torch.ones(4, K, dtype=torch.bfloat16)}
    for name, module in modules.items():
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in module.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {"model_type": "of-nobody"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return {name: module.expected for name, module in modules.items()}


def e4m3_codes(n: int = N, k: int = K) -> Tensor:
    """[n, k] float8_e4m3fn, every finite code in turn."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    return finite.repeat(-(-n * k // len(finite)))[: n * k].reshape(n, k).view(torch.float8_e4m3fn)


def nvfp4_parts() -> tuple[Tensor, Tensor, Tensor]:
    """codes [N, K / 2] uint8, block scale [N, K / 16] float8_e4m3fn, and the codes' values [N, K] float32."""
    packed = (torch.arange(N * K // 2) % 256).to(torch.uint8).reshape(N, K // 2)
    values = torch.stack((E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]), -1).reshape(N, K)
    scale = torch.linspace(0.5, 448, N * K // 16).reshape(N, K // 16).to(torch.float8_e4m3fn)
    return packed, scale, values


def modelopt_nvfp4() -> Module:
    """weight_scale_2 multiplies the block scale."""
    packed, scale, values = nvfp4_parts()
    total = torch.tensor(0.00037)
    factor = (scale.float() * total).repeat_interleave(16, 1)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": total}
    return Module(tensors={**tensors, "input_scale": torch.tensor(0.002)}, expected=values * factor)


def compressed_nvfp4() -> Module:
    """weight_global_scale divides the block scale."""
    packed, scale, values = nvfp4_parts()
    total = torch.tensor([5334.0])
    factor = (scale.float() / total).repeat_interleave(16, 1)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": total}
    return Module(tensors=tensors, expected=values * factor)


def fp8_tensor(name: str = "weight_scale") -> Module:
    """One scale for the matrix, with a static input scale."""
    scale = torch.tensor(0.0123)
    tensors = {"weight": e4m3_codes(), name: scale, "input_scale": torch.tensor(0.02)}
    return Module(tensors=tensors, expected=e4m3_codes().float() * scale)


def fp8_row() -> Module:
    """A bfloat16 scale per row."""
    scale = torch.linspace(0.01, 1, N).reshape(N, 1).to(torch.bfloat16)
    return Module(
        tensors={"weight": e4m3_codes(), "weight_scale": scale}, expected=e4m3_codes().float() * scale.float()
    )


def fp8_block() -> Module:
    """A float32 scale per block of 128 x 128, the last blocks partial; `_inv` multiplies all the same."""
    n, k = 160, 192
    scale = torch.tensor([[0.01, 0.02], [0.03, 0.04]])
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return Module(
        tensors={"weight": e4m3_codes(n, k), "weight_scale_inv": scale},
        expected=e4m3_codes(n, k).float() * spread,
    )


def mxfp8() -> Module:
    """An E8M0 scale per 32 elements of K."""
    scale = (torch.arange(N * K // 32) % 20 + 117).to(torch.uint8).reshape(N, K // 32)
    spread = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    return Module(
        tensors={"weight": e4m3_codes(), "weight_scale": scale}, expected=e4m3_codes().float() * spread
    )


def plain(dtype: torch.dtype) -> Module:
    """Not quantized."""
    weight = torch.linspace(-2, 2, N * K).reshape(N, K).to(dtype)
    return Module(tensors={"weight": weight}, expected=weight.float())


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """The quantization block that ModelOpt writes."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The quantization block that compressed-tensors writes, for one group of all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
