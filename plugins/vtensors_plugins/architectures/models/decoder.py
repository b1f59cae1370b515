"""A whole decoder: embeddings, layers, final norm, head; one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from vtensors import records
from vtensors.errors import ArchitectureError
from vtensors_formats import PlainWeight
from vtensors_kernels.compiling.launch import launching_on
from vtensors_kernels.reference.rope import rope_angles
from vtensors_kernels.steps.rows import device_of
from vtensors_plugins.architectures.build import BuildOptions, EmbeddingCall, LinearCall, Parts
from vtensors_plugins.architectures.decoder_config import LINEAR, DecoderConfig
from vtensors_plugins.architectures.models.attention import Attention, build_attention
from vtensors_plugins.architectures.models.finite import check_finite
from vtensors_plugins.architectures.models.gated_delta_net import GatedDeltaNet, build_gated_delta_net
from vtensors_plugins.architectures.models.mlp import Mlp, build_mlp
from vtensors_plugins.architectures.models.moe import Moe, build_moe
from vtensors_plugins.architectures.models.norm import RMSNorm, warn_of_plain_gains
from vtensors_plugins.architectures.models.norm_kernels import norm_binder
from vtensors_plugins.architectures.models.rotary import inverse_frequencies
from vtensors_plugins.architectures.models.state import DeltaNetState, KeyValueCache, SequenceState


@attrs.frozen(kw_only=True)
class DecoderLayer:
    """h += mixer(norm(h)); h += mlp(norm(h)). Both parts get h and the norm, and add to h themselves."""

    input_norm: RMSNorm
    mixer: Attention | GatedDeltaNet
    post_norm: RMSNorm
    mlp: Mlp | Moe

    def __call__(self, h: Tensor, state: KeyValueCache | DeltaNetState, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], model dtype; moves the layer's state T tokens on."""
        return self.feed(self.mix(h, state, cos, sin))

    def mix(self, h: Tensor, state: KeyValueCache | DeltaNetState, cos: Tensor, sin: Tensor) -> Tensor:
        """The first half of the layer: [T, hidden] -> [T, hidden]; moves the state on."""
        return self.mixer(h, self.input_norm, state, cos, sin)

    def feed(self, h: Tensor) -> Tensor:
        """The second half: [T, hidden] -> [T, hidden]."""
        return self.mlp(h, self.post_norm)


@attrs.frozen(kw_only=True, eq=False)
class Decoder:
    """A model that runs. selected: which kernel serves each weight.

    dtype: of activations, caches and logits. max_positions: as config.json says, for the caller to keep to.
    debug_nan: raise VtensorsError at the first part whose output is not finite.
    """

    vocab_size: int
    num_layers: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    embed: EmbeddingCall
    frequencies: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: LinearCall
    selected: tuple[records.Selected, ...]
    debug_nan: bool = False

    def new_state(self) -> SequenceState:
        """The state of a sequence without tokens."""
        return SequenceState(tuple(layer.mixer.new_state(self.dtype, self.device) for layer in self.layers))

    @torch.inference_mode()
    def step(self, token_ids: Tensor, state: SequenceState) -> Tensor:
        """Logits [V], model dtype, of the last of the T tokens, which are appended to the state.

        token_ids: [T] int64, T >= 1. One token decodes, several at once are a prompt or a piece of one.
        """
        with launching_on(self.device):
            return self._logits(self._hidden(token_ids, state)[-1:])[0]

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """[B, T, V], model dtype, of every token. input_ids: [B, T] int64; rows do not see each other."""
        with launching_on(self.device):
            return torch.stack([self._logits(self._hidden(row, self.new_state())) for row in input_ids])

    def _logits(self, x: Tensor) -> Tensor:
        return self._seen(self.head(x), "lm_head", "head")

    def _hidden(self, token_ids: Tensor, state: SequenceState) -> Tensor:
        """[T, hidden] behind the final norm."""
        ids = token_ids.to(self.device)
        end = state.length + ids.shape[0]
        positions = torch.arange(state.length, end, device=self.device)
        cos, sin = rope_angles(positions, self.frequencies)
        h = self._seen(self.embed(ids, self.dtype), "embed_tokens", "embedding")
        for index, (layer, layer_state) in enumerate(zip(self.layers, state.layers, strict=True)):
            h = self._seen(layer.mix(h, layer_state, cos, sin), f"layers.{index}", "mixer")
            h = self._seen(layer.feed(h), f"layers.{index}", "mlp")
        state.length = end
        return self._seen(self.norm(h), "norm", "norm")

    def _seen(self, x: Tensor, place: str, part: str) -> Tensor:
        return check_finite(x, place, part) if self.debug_nan else x


def build_decoder(
    config: DecoderConfig, weights: Mapping[str, records.Weight], options: BuildOptions
) -> Decoder:
    """The decoder with its kernels bound. weights: canonical name -> Weight, as the plan names them.

    Without `lm_head` the head shares the embeddings, if config.json ties them; so it does where `lm_head` only
    repeats them. Raises ArchitectureError on a
    missing weight, VtensorsError where no kernel serves one.
    """
    device = torch.device(options.device)
    if options.dry_run is not None:
        return _built(config, weights, options)
    if device.type == "cuda" and torch.cuda.is_available():
        # With its index: what is remembered of a device must not be taken for another one's.
        options = attrs.evolve(options, device=device_of(device))
    with launching_on(torch.device(options.device)):
        return _built(config, weights, options)


def _built(config: DecoderConfig, weights: Mapping[str, records.Weight], options: BuildOptions) -> Decoder:
    device = torch.device(options.device)
    if "lm_head" not in weights and not config.tied:
        raise ArchitectureError(
            "weight is missing",
            tensor="lm_head",
            seen="not among the weights that were given",
            accepted="every weight of the plan",
            fix="load every weight of the plan",
        )
    tied = config.tied and ("lm_head" not in weights or _repeats(weights["lm_head"], weights["embed_tokens"]))
    parts = Parts(weights, options, shared=frozenset({"embed_tokens"} if tied else ()))
    if config.zero_centered:
        warn_of_plain_gains([parts.small(name) for name in weights if name.endswith("layernorm")])

    def norm(name: str) -> RMSNorm:
        weight = parts.small(name)
        return RMSNorm(weight, config.eps, config.zero_centered, norm_binder(weight.shape[0], options))

    def layer(index: int, kind: str) -> DecoderLayer:
        place = f"layers.{index}"
        mixer: Attention | GatedDeltaNet
        if kind == LINEAR and config.delta_net is not None:
            mixer = build_gated_delta_net(parts, config.delta_net, config.eps, index)
        else:
            mixer = build_attention(parts, config, index)
        mlp: Mlp | Moe
        if config.moe is not None:
            mlp = build_moe(parts, config.moe, f"{place}.mlp")
        else:
            mlp = build_mlp(parts, f"{place}.mlp", bias=config.mlp_bias)
        return DecoderLayer(
            input_norm=norm(f"{place}.input_layernorm"),
            mixer=mixer,
            post_norm=norm(f"{place}.post_attention_layernorm"),
            mlp=mlp,
        )

    return Decoder(
        vocab_size=config.vocab_size,
        num_layers=len(config.layers),
        max_positions=config.max_positions,
        dtype=options.dtype,
        device=device,
        embed=parts.embedding("embed_tokens"),
        frequencies=inverse_frequencies(config.attention.rope).to(device),
        layers=tuple(layer(index, kind) for index, kind in enumerate(config.layers)),
        norm=norm("norm"),
        head=parts.linear("embed_tokens" if tied else "lm_head"),
        selected=tuple(parts.selected),
        debug_nan=options.debug_nan,
    )


def _repeats(head: records.Weight, embeddings: records.Weight) -> bool:
    """Whether the head's values are those of the embeddings; without data, whether they may be."""
    return (
        isinstance(head, PlainWeight)
        and isinstance(embeddings, PlainWeight)
        and head.scheme == embeddings.scheme
        and (head.tensor.is_meta or torch.equal(head.tensor, embeddings.tensor))
    )
