"""The weights that a decoder expects, from its config and the checkpoint's module names alone. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtensors.records import ExpectedWeight, ModelPlan
from vtensors_plugins.architectures.decoder_config import (
    LINEAR,
    AttentionConfig,
    DecoderConfig,
    DeltaNetConfig,
    MoeConfig,
)
from vtensors_plugins.architectures.prefixes import find_head, find_prefix, waivers_for

# Name below the layer, shape, part.
_Row = tuple[str, tuple[int, ...], str]


def plan_decoder(config: DecoderConfig, module_names: Sequence[str]) -> ModelPlan:
    """Every expected weight under its canonical name: `embed_tokens`, `layers.0.mlp.down_proj`, `lm_head`.

    A tied head that the checkpoint does not hold is left out; one that it holds is used, with a note.
    Raises ArchitectureError on unknown or doubled prefixes.
    """
    names = frozenset(module_names)
    prefix = find_prefix(module_names)
    weights: dict[str, ExpectedWeight] = {}
    vocabulary = (config.vocab_size, config.hidden)
    weights["embed_tokens"] = ExpectedWeight(
        module=f"{prefix}embed_tokens", shape=vocabulary, part="embeddings", bias=False
    )
    biased = _biased(config)
    for index, kind in enumerate(config.layers):
        for name, shape, part in _layer(config, kind):
            place = f"layers.{index}.{name}"
            weights[place] = ExpectedWeight(
                module=prefix + place, shape=shape, part=part, layer=index, bias=name in biased
            )
    weights["norm"] = ExpectedWeight(module=f"{prefix}norm", shape=(config.hidden,), part="norm", bias=False)
    head = find_head(names)
    if head is not None or not config.tied:
        weights["lm_head"] = ExpectedWeight(
            module=head or "lm_head", shape=vocabulary, part="lm_head", bias=False
        )
    return ModelPlan(
        weights=weights,
        waivers=waivers_for(module_names),
        notes=(_tied_note(head),) if config.tied and head else (),
    )


def _tied_note(head: str) -> str:
    return f"tie_word_embeddings is true, but the checkpoint holds '{head}': the file's head is used"


def _biased(config: DecoderConfig) -> frozenset[str]:
    """Names below the layer of the linears for which config.json announces a bias; nothing else has one."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj") if config.attention.bias else ()
    mlp = ("gate_proj", "up_proj", "down_proj") if config.mlp_bias else ()
    return frozenset((*(f"self_attn.{name}" for name in attention), *(f"mlp.{name}" for name in mlp)))


def _layer(config: DecoderConfig, kind: str) -> Iterator[_Row]:
    yield "input_layernorm", (config.hidden,), "norm"
    if kind == LINEAR and config.delta_net is not None:
        yield from _delta_net(config.delta_net, config.hidden)
    else:
        yield from _attention(config.attention, config.hidden)
    yield "post_attention_layernorm", (config.hidden,), "norm"
    if config.moe is not None:
        yield from _moe(config.moe, config.hidden)
    elif config.mlp_width is not None:
        yield from _swiglu("mlp", config.mlp_width, config.hidden, "mlp")


def _attention(config: AttentionConfig, hidden: int) -> Iterator[_Row]:
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "self_attn.q_proj", (width * (2 if config.gated else 1), hidden), "attention"
    yield "self_attn.k_proj", (kv_width, hidden), "attention"
    yield "self_attn.v_proj", (kv_width, hidden), "attention"
    yield "self_attn.o_proj", (hidden, width), "attention"
    if config.qk_norm:
        yield "self_attn.q_norm", (config.head_dim,), "norm"
        yield "self_attn.k_norm", (config.head_dim,), "norm"


def _delta_net(config: DeltaNetConfig, hidden: int) -> Iterator[_Row]:
    heads = config.value_heads
    yield "linear_attn.in_proj_qkv", (config.channels, hidden), "linear_attention"
    yield "linear_attn.in_proj_z", (config.value_width, hidden), "linear_attention"
    yield "linear_attn.in_proj_b", (heads, hidden), "linear_attention"
    yield "linear_attn.in_proj_a", (heads, hidden), "linear_attention"
    yield "linear_attn.conv1d", (config.channels, 1, config.taps), "linear_attention"
    yield "linear_attn.A_log", (heads,), "linear_attention"
    yield "linear_attn.dt_bias", (heads,), "linear_attention"
    yield "linear_attn.norm", (config.value_dim,), "norm"
    yield "linear_attn.out_proj", (hidden, config.value_width), "linear_attention"


def _moe(config: MoeConfig, hidden: int) -> Iterator[_Row]:
    yield "mlp.gate", (config.experts, hidden), "router"
    for expert in range(config.experts):
        yield from _swiglu(f"mlp.experts.{expert}", config.width, hidden, "experts")
    yield from _swiglu("mlp.shared_expert", config.shared_width, hidden, "shared_expert")
    yield "mlp.shared_expert_gate", (1, hidden), "shared_expert"


def _swiglu(name: str, width: int, hidden: int, part: str) -> Iterator[_Row]:
    yield f"{name}.gate_proj", (width, hidden), part
    yield f"{name}.up_proj", (width, hidden), part
    yield f"{name}.down_proj", (hidden, width), part
