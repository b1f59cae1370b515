"""Small random models of every family, for tests of planning, building and running.

Import as `from tiny_decoders import CONFIGS, tiny_weights, tiny_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from vtensors.records import ModelPlan
from vtensors_formats import PlainWeight, Weight
from vtensors_plugins.architectures import llama, qwen3, qwen3_5
from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.models.decoder import Decoder
from vtensors_plugins.backends import reference

_COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRID = {
    **_COMMON,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**_HYBRID, "model_type": "qwen3_5_text", "intermediate_size": 48},
    "qwen3_5_moe": {
        **_HYBRID,
        "model_type": "qwen3_5_moe_text",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "rope_parameters": _ROPE,
    },
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "rope_parameters": _ROPE,
    },
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A copy of the family's config with changes; a value of None removes the field."""
    config = copy.deepcopy(CONFIGS[family]) | changes
    return {name: value for name, value in config.items() if value is not None}


def family_of(config: Mapping[str, Any]) -> Any:
    """The architecture plugin that knows the config."""
    for plugin in (qwen3_5, qwen3, llama):
        if plugin.vtensors_architectures()[0].matches(config):
            return plugin
    raise LookupError(config.get("model_type"))


def tiny_names(config: Mapping[str, Any], prefix: str = "model.", head: str | None = "lm_head") -> list[str]:
    """Module names of a complete checkpoint of the config."""
    plan: ModelPlan = family_of(config).plan(config, ["model.embed_tokens", "lm_head"])
    names = [prefix + name for name in plan.weights if name != "lm_head"]
    return [*names, head] if head else names


def tiny_weights(
    config: Mapping[str, Any], *, seed: int = 0, head: str | None = "lm_head"
) -> dict[str, Weight]:
    """Random weights by canonical name; norms and gates are far from their neutral values."""
    plan: ModelPlan = family_of(config).plan(config, tiny_names(config, head=head))
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Weight] = {}
    for name, expected in plan.weights.items():
        tensor = torch.randn(expected.shape, generator=generator)
        scale = expected.shape[-1] ** -0.5 if len(expected.shape) > 1 else 0.5
        weights[name] = PlainWeight(tensor=tensor * scale)
    return weights


def tiny_model(
    config: Mapping[str, Any],
    weights: Mapping[str, Weight] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    executed: Mapping[str, str] | None = None,
    kv_quant: Mapping[int, tuple[float, float]] | None = None,
    debug_nan: bool = False,
) -> Decoder:
    """The model, on the CPU with the reference kernels."""
    options = BuildOptions(
        dtype=dtype,
        device="cpu",
        kernels=reference.vtensors_kernels(),
        executed=executed or {},
        kv_quant=kv_quant,
        debug_nan=debug_nan,
    )
    model: Decoder = family_of(config).build(config, weights or tiny_weights(config), options)
    return model
