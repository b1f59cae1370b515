"""What a decoder is, read from config.json once: the records that planning and building share. Torch-free."""

from __future__ import annotations

import attrs

FULL = "full_attention"
LINEAR = "linear_attention"


@attrs.frozen(kw_only=True)
class RopeConfig:
    """Rotary embedding. dim: rotated dimensions of a head; theta: base; llama3: its frequency scaling."""

    dim: int
    theta: float
    llama3: Llama3Scaling | None = None


@attrs.frozen(kw_only=True)
class Llama3Scaling:
    """The `llama3` rope type: low frequencies are divided by factor, those between are blended.

    original_positions: context length before scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@attrs.frozen(kw_only=True)
class AttentionConfig:
    """Full attention. gated: q_proj gives query and gate per head; qk_norm: q_norm and k_norm are there."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    gated: bool = False
    qk_norm: bool = False
    bias: bool = False


@attrs.frozen(kw_only=True)
class DeltaNetConfig:
    """Gated delta net: heads and their sizes, taps of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_width(self) -> int:
        """Rows of q (and of k) in in_proj_qkv."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Rows of v in in_proj_qkv, of in_proj_z, and columns of out_proj."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_width + self.value_width


@attrs.frozen(kw_only=True)
class MoeConfig:
    """Mixture of experts with one shared expert. width: of a routed expert."""

    experts: int
    chosen: int
    width: int
    shared_width: int


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """A decoder-only model. Exactly one of mlp_width and moe is set.

    layers: `full_attention` or `linear_attention` per layer. zero_centered: norms hold gain - 1.
    tied: config.json says that the head shares the embeddings.
    """

    vocab_size: int
    hidden: int
    layers: tuple[str, ...]
    eps: float
    max_positions: int
    attention: AttentionConfig
    delta_net: DeltaNetConfig | None = None
    mlp_width: int | None = None
    mlp_bias: bool = False
    moe: MoeConfig | None = None
    zero_centered: bool = False
    tied: bool = False
