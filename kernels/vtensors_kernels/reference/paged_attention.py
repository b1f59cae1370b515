"""Attention of new tokens over a cache in pages: norms, rotation, the cache's own rounding, attention, gate."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors_formats import e4m3
from vtensors_kernels.reference.attention import attention
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.rope import rope

PAGE_TOKENS = 64


@attrs.frozen(kw_only=True, eq=False)
class AttentionShape:
    """What one attention layer computes.

    heads, kv_heads: the former a multiple of the latter. head_dim: D. rotary_dim: R, even, of which the first half is
    turned with the second; 0 turns nothing. gated: behind each query of q lie D values whose sigmoid multiplies the
    result. q_gain, k_gain: [D] float32 of norms over D, or None. scale: of scores. dtype: bfloat16 or float16.
    kv_scales: (k_scale, v_scale) where pages hold E4M3 of value / scale, or None where they hold the dtype.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float
    scale: float
    dtype: torch.dtype
    kv_scales: tuple[float, float] | None


def paged_attention(
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Tensor,
    start: int,
    cos_sin: Tensor,
) -> Tensor:
    """float32 [T, H * D] of T new tokens of one sequence, not rounded; they enter the pages.

    q: [T, H * D], gated [T, H * 2 * D]. k, v: [T, KV * D]. k_pages, v_pages: [all pages, KV, 64, D]. pages: [P] numbers
    of the sequence's, in order. start: tokens before these. cos_sin: [positions, R] float32, cosines before sines.
    """
    tokens, dim = q.shape[0], shape.head_dim
    queries = q.reshape(tokens, shape.heads, -1)
    keys, values = k.reshape(tokens, -1, dim), v.reshape(tokens, -1, dim)
    turned = queries[..., :dim]
    if shape.q_gain is not None:
        turned = rms_norm(turned, shape.q_gain, shape.eps, zero_centered=False)
    if shape.k_gain is not None:
        keys = rms_norm(keys, shape.k_gain, shape.eps, zero_centered=False)
    if shape.rotary_dim:
        cos, sin = cos_sin[start : start + tokens].chunk(2, dim=-1)
        turned, keys = rope(turned, cos, sin), rope(keys, cos, sin)
    places = torch.arange(start, start + tokens, device=q.device)
    own = pages.long()[places // PAGE_TOKENS]
    for all_pages, new, scale in zip((k_pages, v_pages), (keys, values), _scales(shape), strict=True):
        stored = new if scale is None else e4m3.as_bytes(e4m3.encode(new.float() / scale))
        target = all_pages if scale is None else e4m3.as_bytes(all_pages)
        target[own, :, places % PAGE_TOKENS] = stored
    seen = [
        read_pages(all_pages, pages, start + tokens, scale, shape.dtype)
        for all_pages, scale in zip((k_pages, v_pages), _scales(shape), strict=True)
    ]
    mixed = attention(turned, seen[0], seen[1], shape.scale)
    if shape.gated:
        mixed = mixed * queries[..., dim:].float().sigmoid()
    return mixed.reshape(tokens, -1)


def read_pages(
    all_pages: Tensor, pages: Tensor, length: int, scale: float | None, dtype: torch.dtype
) -> Tensor:
    """[KV, length, D] in the dtype: the first tokens of a sequence. scale: of E4M3 pages, else None."""
    count = -(-length // PAGE_TOKENS)
    listed = pages[:count].long()
    own = all_pages[listed] if scale is None else e4m3.as_bytes(all_pages)[listed]
    flat = own.transpose(0, 1).reshape(own.shape[1], -1, own.shape[3])[:, :length]
    return flat if scale is None else (e4m3.decode(flat.contiguous()) * scale).to(dtype)


def _scales(shape: AttentionShape) -> tuple[float | None, float | None]:
    return shape.kv_scales or (None, None)
