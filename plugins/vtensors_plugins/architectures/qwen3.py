"""Qwen3, dense: attention with normalized queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.hookspecs import hookimpl
from vtensors.records import Architecture, ModelPlan, PluginInfo
from vtensors_plugins.architectures.config_fields import Fields
from vtensors_plugins.architectures.decoder_config import FULL, AttentionConfig, DecoderConfig
from vtensors_plugins.architectures.matching import family_matcher
from vtensors_plugins.architectures.planning import plan_decoder

if TYPE_CHECKING:
    from vtensors.records import Weight
    from vtensors_plugins.architectures.build import BuildOptions
    from vtensors_plugins.architectures.models.decoder import Decoder

MODEL_TYPES = ("qwen3",)


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises ArchitectureError naming a field that is missing or has a value outside the family.
    """
    fields = Fields.of(config)
    fields.only("hidden_act", "silu")
    fields.only("use_sliding_window", False, None)
    fields.only("attention_k_eq_v", False, None)
    head_dim = fields.whole("head_dim")
    # Releases from before transformers 5 have no layer_types; every layer of the family is the same.
    listed = fields.text.get("layer_types") is not None
    layers = fields.layer_kinds(FULL) if listed else (FULL,) * fields.layers()
    return DecoderConfig(
        vocab_size=fields.whole("vocab_size"),
        hidden=fields.whole("hidden_size"),
        layers=layers,
        eps=fields.number("rms_norm_eps"),
        max_positions=fields.whole("max_position_embeddings"),
        attention=AttentionConfig(
            heads=fields.whole("num_attention_heads", multiple_of="num_key_value_heads"),
            kv_heads=fields.whole("num_key_value_heads"),
            head_dim=head_dim,
            rope=fields.rope(head_dim, partial=False),
            qk_norm=True,
            bias=fields.flag("attention_bias"),
        ),
        mlp_width=fields.whole("intermediate_size"),
        tied=fields.tied(),
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
    return PluginInfo(name="qwen3", summary="Qwen3, dense.")


@hookimpl
def vtensors_architectures() -> list[Architecture]:
    """The family."""
    return [
        Architecture(
            name="qwen3",
            summary="Qwen3 dense decoder with normalized queries and keys",
            model_types=MODEL_TYPES,
            matches=family_matcher(MODEL_TYPES, ("Qwen3ForCausalLM",)),
            plan=plan,
            build=f"{__name__}:build",
        )
    ]
