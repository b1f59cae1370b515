"""What running sequences leave on the device: KV pages of attention layers, slots of delta net layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from vtensors.counts import agreeing, counted
from vtensors_engine.pages import PageAllocator
from vtensors_engine.runner import NoRoomError
from vtensors_engine.slots import SlotAllocator
from vtensors_plugins.architectures.models.attention import Attention
from vtensors_plugins.architectures.models.gated_delta_net import GatedDeltaNet

if TYPE_CHECKING:
    from vtensors_plugins.architectures.models.decoder import Decoder

PAGE_TOKENS = 64
# Of the free memory, what stays free for activations, graphs and the widening of one layer at a time.
_KEPT_FREE = 0.10
_LEAST_FREE = 1 << 30


@attrs.frozen(kw_only=True, eq=False)
class PagedKeyValues:
    """One attention layer. keys, values: [pages, KV, 64, D], the model's dtype or float8_e4m3fn."""

    keys: Tensor
    values: Tensor


@attrs.frozen(kw_only=True, eq=False)
class DeltaNetSlots:
    """One delta net layer, a slot per sequence.

    history: [S, W, C] in the model's dtype, the raw inputs of the convolution, position p at entry p % W.
    memory: [S, HV, DK, DV] float32.
    """

    history: Tensor
    memory: Tensor


@attrs.frozen(kw_only=True, eq=False)
class Caches:
    """The memory of all layers and who has which part of it. layers: one entry per layer of the decoder."""

    pages: PageAllocator
    slots: SlotAllocator
    layers: tuple[PagedKeyValues | DeltaNetSlots, ...]

    @property
    def dummy_slot(self) -> int:
        """The slot of padding rows."""
        return self.slots.dummy

    @property
    def nbytes(self) -> int:
        """Of all layers on the device."""
        return sum(
            tensor.nbytes
            for layer in self.layers
            for tensor in attrs.astuple(layer, recurse=False)
            if isinstance(tensor, Tensor)
        )


def new_caches(decoder: Decoder, *, sequences: int, tokens: int | None) -> Caches:
    """Memory for so many sequences at a time and so many tokens of all of them together.

    tokens: None takes what the longest sequences could need, or as much as fits. Raises NoRoomError where the
    device has not enough free memory, before anything is allocated.
    """
    slot_bytes = sum(_slot_bytes(layer.mixer, decoder) for layer in decoder.layers)
    page_bytes = sum(_page_bytes(layer.mixer, decoder) for layer in decoder.layers)
    free, _ = torch.cuda.mem_get_info(decoder.device)
    free += torch.cuda.memory_reserved(decoder.device) - torch.cuda.memory_allocated(decoder.device)
    usable = free - max(int(free * _KEPT_FREE), min(_LEAST_FREE, free // 2)) - (sequences + 1) * slot_bytes
    longest = -(-decoder.max_positions // PAGE_TOKENS) * sequences
    wanted = longest if tokens is None else -(-tokens // PAGE_TOKENS)
    fitting = usable // page_bytes if page_bytes else wanted
    pages = min(wanted, fitting) if tokens is None else wanted
    if pages > fitting or pages < 1 or usable < 0:
        need = agreeing(sequences, "needs", "need")
        raise NoRoomError(
            "the device has not enough free memory for the caches",
            seen=f"{free / 1e9:.1f} GB free; {counted(sequences, 'sequence')} {need} "
            f"{(sequences + 1) * slot_bytes / 1e9:.1f} GB of state, and {max(pages, 1) * PAGE_TOKENS} tokens "
            f"{max(pages, 1) * page_bytes / 1e9:.1f} GB of keys "
            "and values",
            fix="pass a smaller max_sequences or max_tokens",
        )
    return Caches(
        pages=PageAllocator(pages + 1, PAGE_TOKENS),
        slots=SlotAllocator(sequences + 1),
        layers=tuple(_new_layer(layer.mixer, decoder, pages + 1, sequences + 1) for layer in decoder.layers),
    )


def _new_layer(
    mixer: Attention | GatedDeltaNet, decoder: Decoder, pages: int, slots: int
) -> PagedKeyValues | DeltaNetSlots:
    if isinstance(mixer, Attention):
        own = mixer.config
        shape = (pages, own.kv_heads, PAGE_TOKENS, own.head_dim)
        dtype = decoder.dtype if mixer.kv_scales is None else torch.float8_e4m3fn
        keys, values = (torch.empty(shape, dtype=dtype, device=decoder.device) for _ in range(2))
        return PagedKeyValues(keys=keys, values=values)
    net = mixer.config
    return DeltaNetSlots(
        history=torch.empty(slots, net.taps, net.channels, dtype=decoder.dtype, device=decoder.device),
        memory=torch.empty(slots, net.value_heads, net.key_dim, net.value_dim, device=decoder.device),
    )


def _slot_bytes(mixer: Attention | GatedDeltaNet, decoder: Decoder) -> int:
    if isinstance(mixer, Attention):
        return 0
    net = mixer.config
    return (
        net.taps * net.channels * decoder.dtype.itemsize + net.value_heads * net.key_dim * net.value_dim * 4
    )


def _page_bytes(mixer: Attention | GatedDeltaNet, decoder: Decoder) -> int:
    if not isinstance(mixer, Attention):
        return 0
    own = mixer.config
    itemsize = decoder.dtype.itemsize if mixer.kv_scales is None else 1
    return 2 * own.kv_heads * PAGE_TOKENS * own.head_dim * itemsize
