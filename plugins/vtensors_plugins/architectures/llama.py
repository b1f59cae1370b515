"""Llama 2 and 3: plain grouped-query attention, optional biases, `llama3` rope scaling."""

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

MODEL_TYPES = ("llama",)


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises ArchitectureError naming a field that is missing or has a value outside the family.
    """
    fields = Fields.of(config)
    fields.only("hidden_act", "silu")
    fields.only("attention_k_eq_v", False, None)
    heads = fields.whole("num_attention_heads", multiple_of="num_key_value_heads")
    hidden = fields.whole("hidden_size")
    # Llama 2 and 3 releases leave head_dim out: the heads then share the hidden size.
    derived = fields.text.get("head_dim") is None
    if derived and hidden % heads:
        raise fields.refusal("num_attention_heads", str(heads), f"a divisor of hidden_size {hidden}")
    head_dim = hidden // heads if derived else fields.whole("head_dim")
    return DecoderConfig(
        vocab_size=fields.whole("vocab_size"),
        hidden=hidden,
        layers=(FULL,) * fields.layers(),
        eps=fields.number("rms_norm_eps"),
        max_positions=fields.whole("max_position_embeddings"),
        attention=AttentionConfig(
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads"),
            head_dim=head_dim,
            rope=fields.rope(head_dim, partial=False),
            bias=fields.flag("attention_bias"),
        ),
        mlp_width=fields.whole("intermediate_size"),
        mlp_bias=fields.flag("mlp_bias"),
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
    return PluginInfo(name="llama", summary="Llama 2 and 3.")


@hookimpl
def vtensors_architectures() -> list[Architecture]:
    """The family."""
    return [
        Architecture(
            name="llama",
            summary="Llama decoder",
            model_types=MODEL_TYPES,
            matches=family_matcher(MODEL_TYPES, ("LlamaForCausalLM",)),
            plan=plan,
            build=f"{__name__}:build",
        )
    ]
