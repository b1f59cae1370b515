"""config.json and hf_quant_config.json of the two published Qwen3.6 NVFP4 checkpoints, for any depth and width."""

from __future__ import annotations

from typing import Any

from synthetic_models import Model, declarations

_KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


def configs(model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and hf_quant_config.json."""
    layers = declarations(model)
    fp8, nvfp4 = {"dynamic": False, "num_bits": 8, "type": "float"}, {"dynamic": False, "num_bits": 4}
    nvfp4 |= {"type": "float", "group_size": 16}
    by_group = {
        "group_0": {"input_activations": fp8, "weights": fp8, "targets": _targets(layers, "FP8")},
        "group_1": {"weights": nvfp4, "targets": _targets(layers, "W4A16_NVFP4")},
    }
    # The two writers differ: in the order of the exclusions, and in whether the KV cache and the activations of
    # the weight-only group are written into config.json.
    excluded = ["mtp*", "mtp.layers.0*"]
    quantization: dict[str, Any] = {"config_groups": by_group, "quantized_layers": layers}
    if model.experts:
        excluded = excluded[::-1]
        by_group["group_1"] = {"input_activations": nvfp4, **by_group["group_1"]}
    quantization |= {"ignore": excluded, "quant_algo": "MIXED_PRECISION"}
    if not model.experts:
        quantization["kv_cache_scheme"] = _KV_SCHEME
    quantization["producer"] = {"name": "modelopt", "version": "0.37.0" if model.experts else "0.45.0"}
    quantization["quant_method"] = "modelopt"
    hf_quant = {
        "producer": {"name": "modelopt", "version": "0.44.0" if model.experts else "0.45.0"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "quantized_layers": layers,
            "exclude_modules": excluded,
        },
    }
    return {**_config(model), "quantization_config": quantization}, hf_quant


def _targets(layers: dict[str, Any], algorithm: str) -> list[str]:
    return sorted(name for name, entry in layers.items() if entry["quant_algo"] == algorithm)


def _config(model: Model) -> dict[str, Any]:
    kind = "Moe" if model.experts else ""
    return {
        "architectures": [f"Qwen3_5{kind}ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": 248056,
        **({} if model.experts else {"language_model_only": False}),
        "model_type": model.model_type,
        "text_config": _text_config(model),
        "tie_word_embeddings": False,
        "transformers_version": "5.7.0.dev0" if model.experts else "5.7.0",
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": model.vision_depth,
            "dtype": "bfloat16",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": model.vision_hidden,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": model.vision_intermediate,
            "model_type": f"{model.model_type}_vision",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": model.hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


def _text_config(model: Model) -> dict[str, Any]:
    config: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": 0.02,
        "layer_types": model.layer_types,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": model.linear_dim,
        "linear_num_key_heads": model.key_heads,
        "linear_num_value_heads": model.value_heads,
        "linear_value_head_dim": model.linear_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": model.positions,
        "model_type": f"{model.model_type}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": model.vocab,
    }
    if not model.experts:
        return {**config, "intermediate_size": model.intermediate, "output_gate_type": "swish"}
    return {
        **config,
        "moe_intermediate_size": model.intermediate,
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": model.intermediate,
    }
