"""Full attention with grouped heads; gate and query and key norms where the family has them."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors.errors import ArchitectureError
from vtensors_formats import e4m3
from vtensors_kernels.reference.attention import attention
from vtensors_kernels.reference.rope import rope
from vtensors_plugins.architectures.build import AddCall, NormedLinearsCall, Parts
from vtensors_plugins.architectures.decoder_config import AttentionConfig, DecoderConfig
from vtensors_plugins.architectures.models.norm import RMSNorm
from vtensors_plugins.architectures.models.state import DeltaNetState, KeyValueCache


@attrs.frozen(kw_only=True)
class Attention:
    """One attention layer. qkv: q_proj, k_proj and v_proj. kv_scales: (k_scale, v_scale) of an FP8 cache, or None."""

    config: AttentionConfig
    qkv: NormedLinearsCall
    o_proj: AddCall
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    kv_scales: tuple[float, float] | None

    def new_state(self, dtype: torch.dtype, device: torch.device) -> KeyValueCache:
        """An empty cache."""
        return KeyValueCache.empty(self.config.kv_heads, self.config.head_dim, dtype, device)

    def __call__(
        self, h: Tensor, norm: RMSNorm, state: KeyValueCache | DeltaNetState, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """h + attention(norm(h)), [T, hidden]; appends T tokens to the cache. cos, sin: [T, R / 2] float32."""
        if not isinstance(state, KeyValueCache):
            raise ArchitectureError("the state of another kind of layer was given to attention")
        tokens, dim = h.shape[0], self.config.head_dim
        queries, k, v = self.qkv(h, norm)
        q, gate = split_gate(queries, self.config.heads, dim, gated=self.config.gated)
        k = k.view(tokens, self.config.kv_heads, dim)
        v = v.view(tokens, self.config.kv_heads, dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        if self.kv_scales is not None:
            k, v = _through_fp8(k, self.kv_scales[0]), _through_fp8(v, self.kv_scales[1])
        keys, values = state.append(k, v)
        mixed = attention(q, keys, values, dim**-0.5)
        if gate is not None:
            mixed = mixed * gate.to(torch.float32).sigmoid()
        return self.o_proj(mixed.to(h.dtype).reshape(tokens, self.config.heads * dim), h)


def split_gate(projected: Tensor, heads: int, dim: int, *, gated: bool) -> tuple[Tensor, Tensor | None]:
    """q and gate, [T, H, D] each; gate is None where the layer has none.

    projected: [T, H * 2 * D] when gated: per head the first D are the query and the next D the gate.
    """
    if not gated:
        return projected.view(-1, heads, dim), None
    halves = projected.view(-1, heads, 2, dim)
    return halves[:, :, 0], halves[:, :, 1]


def build_attention(parts: Parts, config: DecoderConfig, layer: int) -> Attention:
    """The attention of that layer."""
    own, place = config.attention, f"layers.{layer}.self_attn"

    def norm(name: str) -> RMSNorm | None:
        if not own.qk_norm:
            return None
        return RMSNorm(parts.small(f"{place}.{name}"), config.eps, config.zero_centered)

    quantized = parts.options.kv_quant
    return Attention(
        config=own,
        qkv=parts.norm_linears([f"{place}.{name}" for name in ("q_proj", "k_proj", "v_proj")], bias=own.bias),
        o_proj=parts.linear_add(f"{place}.o_proj", bias=own.bias),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        kv_scales=None if quantized is None else quantized.get(layer),
    )


def _through_fp8(x: Tensor, scale: float) -> Tensor:
    """x as an FP8 E4M3 cache gives it back: e4m3(x / scale) * scale, in x's dtype."""
    return (e4m3.decode(e4m3.encode(x.to(torch.float32) / scale)) * scale).to(x.dtype)
