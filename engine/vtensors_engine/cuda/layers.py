"""The layers of a decoder over paged caches: the bound linears of the decoder, kernels of their own between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import attrs
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_engine.cuda.caches import Caches, DeltaNetSlots, PagedKeyValues
from vtensors_engine.cuda.device_rows import DeviceRows
from vtensors_kernels.steps.gated_delta_net import GatedDeltaNetKernel
from vtensors_kernels.steps.paged_attention import PagedAttention
from vtensors_plugins.architectures.models.attention import Attention
from vtensors_plugins.architectures.models.gated_delta_net import GatedDeltaNet
from vtensors_plugins.architectures.models.norm import RMSNorm

if TYPE_CHECKING:
    from vtensors_plugins.architectures.models.decoder import Decoder


# Rows of which a delta net's gates are computed before its large projections.
_SMALL_FIRST = range(2, 9)


@attrs.frozen(kw_only=True, eq=False)
class Chunk:
    """Some tokens of one prompt.

    start: tokens of the sequence before it; position: the same on the device, [1] int32. slot: [1] int32.
    page_table: [1, P] int32.
    """

    start: int
    position: Tensor
    slot: Tensor
    page_table: Tensor


class Mixer(Protocol):
    """Attention or a delta net over its cache; both add to h."""

    def decode(self, h: Tensor, norm: RMSNorm, rows: DeviceRows) -> Tensor:
        """One token of each row: [B, hidden] -> [B, hidden]."""

    def prefill(self, h: Tensor, norm: RMSNorm, chunk: Chunk) -> Tensor:
        """Some tokens of one sequence: [T, hidden] -> [T, hidden]."""


@attrs.frozen(kw_only=True, eq=False)
class AttentionMixer:
    """cos_sin: [positions, R] float32."""

    layer: Attention
    kernel: PagedAttention
    cache: PagedKeyValues
    cos_sin: Tensor

    def decode(self, h: Tensor, norm: RMSNorm, rows: DeviceRows) -> Tensor:
        """See `Mixer.decode`."""
        q, k, v = self.layer.qkv(h, norm)
        keys, values = self.cache.keys, self.cache.values
        mixed = self.kernel.decode(q, k, v, keys, values, rows.page_table, rows.positions, self.cos_sin)
        return self.layer.o_proj(mixed, h)

    def prefill(self, h: Tensor, norm: RMSNorm, chunk: Chunk) -> Tensor:
        """See `Mixer.prefill`."""
        q, k, v = self.layer.qkv(h, norm)
        keys, values = self.cache.keys, self.cache.values
        mixed = self.kernel.prefill(q, k, v, keys, values, chunk.page_table, chunk.start, self.cos_sin)
        return self.layer.o_proj(mixed, h)


@attrs.frozen(kw_only=True, eq=False)
class DeltaNetMixer:
    """A delta net over its slots."""

    layer: GatedDeltaNet
    kernel: GatedDeltaNetKernel
    cache: DeltaNetSlots

    def decode(self, h: Tensor, norm: RMSNorm, rows: DeviceRows) -> Tensor:
        """See `Mixer.decode`."""
        mixed = self.kernel.decode(*self._inputs(h, norm), rows.slots, rows.positions)
        return self.layer.out_proj(mixed, h)

    def prefill(self, h: Tensor, norm: RMSNorm, chunk: Chunk) -> Tensor:
        """See `Mixer.prefill`."""
        mixed = self.kernel.prefill(*self._inputs(h, norm), chunk.slot, chunk.position)
        return self.layer.out_proj(mixed, h)

    def _inputs(self, h: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """qkv, z, b, a, history, memory, as the kernel takes them."""
        x = norm(h)
        # Behind the large product the small one finds no free SM until the end; before it, it delays its start. Which
        # costs less is a matter of rows (`benchmarks/engine_speed.py`); the results are the same.
        if x.shape[0] in _SMALL_FIRST:
            b, a = self.layer.ba(x)
            qkv, z = self.layer.qkvz(x)
        else:
            qkv, z = self.layer.qkvz(x)
            b, a = self.layer.ba(x)
        return qkv, z, b, a, self.cache.history, self.cache.memory


@attrs.frozen(kw_only=True, eq=False)
class PagedLayer:
    """h += mixer(norm(h)); h += mlp(norm(h))."""

    mixer: Mixer
    input_norm: RMSNorm
    post_norm: RMSNorm
    mlp: Callable[[Tensor, RMSNorm], Tensor]


def paged_layers(decoder: Decoder, caches: Caches, cos_sin: Tensor) -> tuple[PagedLayer, ...]:
    """The decoder's layers over the caches. cos_sin: [positions, R] float32 on the device."""
    return tuple(
        PagedLayer(
            mixer=_mixer(layer.mixer, cache, decoder, cos_sin),
            input_norm=layer.input_norm,
            post_norm=layer.post_norm,
            mlp=layer.mlp,
        )
        for layer, cache in zip(decoder.layers, caches.layers, strict=True)
    )


def _mixer(
    layer: Attention | GatedDeltaNet,
    cache: PagedKeyValues | DeltaNetSlots,
    decoder: Decoder,
    cos_sin: Tensor,
) -> Mixer:
    if isinstance(layer, Attention) and isinstance(cache, PagedKeyValues):
        kernel = attention_kernel(layer, decoder, positions=cos_sin.shape[0])
        return AttentionMixer(layer=layer, kernel=kernel, cache=cache, cos_sin=cos_sin)
    if isinstance(layer, GatedDeltaNet) and isinstance(cache, DeltaNetSlots):
        return DeltaNetMixer(layer=layer, kernel=delta_net_kernel(layer, decoder), cache=cache)
    raise VtensorsError("a layer and its cache are of different kinds", seen=type(layer).__name__)


def attention_kernel(layer: Attention, decoder: Decoder, *, positions: int) -> PagedAttention:
    """The kernel of that layer, for sequences of at most so many positions."""
    own = layer.config
    norm = layer.q_norm
    return PagedAttention(
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_dim=own.head_dim,
        rotary_dim=own.rope.dim,
        gated=own.gated,
        q_gain=None if layer.q_norm is None else layer.q_norm.gain,
        k_gain=None if layer.k_norm is None else layer.k_norm.gain,
        eps=0.0 if norm is None else norm.eps,
        scale=own.head_dim**-0.5,
        dtype=decoder.dtype,
        kv_scales=layer.kv_scales,
        max_positions=positions,
    )


def delta_net_kernel(layer: GatedDeltaNet, decoder: Decoder) -> GatedDeltaNetKernel:
    """The kernel of that layer."""
    return GatedDeltaNetKernel(
        key_heads=layer.config.key_heads,
        value_heads=layer.config.value_heads,
        conv=layer.conv,
        decay=layer.decay,
        dt_bias=layer.dt_bias,
        norm=layer.norm,
        eps=layer.eps,
        dtype=decoder.dtype,
    )
