"""Qwen3.5 and Qwen3.6: gated delta net and gated attention layers, dense or MoE; text path only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.hookspecs import hookimpl
from vtensors.records import Architecture, ModelPlan, PluginInfo
from vtensors_plugins.architectures.config_fields import MAX_EXPERTS, Fields
from vtensors_plugins.architectures.decoder_config import (
    FULL,
    LINEAR,
    AttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
    MoeConfig,
)
from vtensors_plugins.architectures.matching import family_matcher
from vtensors_plugins.architectures.planning import plan_decoder

if TYPE_CHECKING:
    from vtensors.records import Weight
    from vtensors_plugins.architectures.build import BuildOptions
    from vtensors_plugins.architectures.models.decoder import Decoder

_MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text", *_MOE_TYPES)
_CLASSES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json (nested or flat) describes.

    Raises ArchitectureError naming a field that is missing or has a value outside the family.
    """
    fields = Fields.of(config)
    fields.only("hidden_act", "silu")
    fields.only("output_gate_type", "swish", "silu")
    fields.only("attn_output_gate", True)
    fields.only("attention_k_eq_v", False, None)
    moe = config.get("model_type") in _MOE_TYPES or "num_experts" in fields.text
    head_dim = fields.whole("head_dim")
    return DecoderConfig(
        vocab_size=fields.whole("vocab_size"),
        hidden=fields.whole("hidden_size"),
        layers=fields.layer_kinds(LINEAR, FULL),
        eps=fields.number("rms_norm_eps"),
        max_positions=fields.whole("max_position_embeddings"),
        attention=AttentionConfig(
            heads=fields.whole("num_attention_heads", multiple_of="num_key_value_heads"),
            kv_heads=fields.whole("num_key_value_heads"),
            head_dim=head_dim,
            rope=fields.rope(head_dim, partial=True),
            gated=True,
            qk_norm=True,
            bias=fields.flag("attention_bias"),
        ),
        delta_net=DeltaNetConfig(
            key_heads=fields.whole("linear_num_key_heads"),
            value_heads=fields.whole("linear_num_value_heads", multiple_of="linear_num_key_heads"),
            key_dim=fields.whole("linear_key_head_dim"),
            value_dim=fields.whole("linear_value_head_dim"),
            taps=fields.whole("linear_conv_kernel_dim"),
        ),
        mlp_width=None if moe else fields.whole("intermediate_size"),
        moe=_moe(fields) if moe else None,
        zero_centered=True,
        tied=fields.tied(),
    )


def _moe(fields: Fields) -> MoeConfig:
    # The weights of the chosen experts are always renormalized; every layer is sparse.
    fields.only("norm_topk_prob", True)
    fields.only("mlp_only_layers", [], None)
    experts = fields.whole("num_experts", at_most=MAX_EXPERTS // fields.layers())
    chosen = fields.whole("num_experts_per_tok")
    if chosen > experts:
        raise fields.refusal("num_experts_per_tok", str(chosen), f"at most num_experts = {experts}")
    return MoeConfig(
        experts=experts,
        chosen=chosen,
        width=fields.whole("moe_intermediate_size"),
        shared_width=fields.whole("shared_expert_intermediate_size"),
    )


def plan(config: Mapping[str, Any], module_names: Sequence[str]) -> ModelPlan:
    """The weights that the model needs. config: config.json; module_names: those of the checkpoint."""
    return plan_decoder(read_config(config), module_names)


def build(config: Mapping[str, Any], weights: Mapping[str, Weight], options: BuildOptions) -> Decoder:
    """The model. weights: canonical name -> Weight, as `plan` names them."""
    from vtensors_plugins.architectures.models.decoder import build_decoder

    return build_decoder(read_config(config), weights, options)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """Who this plugin is."""
    return PluginInfo(name="qwen3_5", summary="Qwen3.5 and Qwen3.6, dense and MoE (text path).")


@hookimpl
def vtensors_architectures() -> list[Architecture]:
    """The family."""
    return [
        Architecture(
            name="qwen3_5",
            summary="Qwen3.5 / Qwen3.6 hybrid of gated delta net and attention, dense or MoE, text path",
            model_types=MODEL_TYPES,
            matches=family_matcher(MODEL_TYPES, _CLASSES),
            plan=plan,
            build=f"{__name__}:build",
        )
    ]
