"""Causal attention of the newest T tokens over a cache of S, with grouped key-value heads."""

from __future__ import annotations

import torch
from torch import Tensor

# Scores of one block of queries, as float32, take at most this much.
SCORE_BYTES = 64 << 20


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[T, H, D] float32.

    q: [T, H, D]. keys, values: [KV, S, D], the T newest tokens included, so that query t is at position
    S - T + t. Query head j reads key-value head j // (H / KV). float32 inside.
    """
    tokens, heads, dim = q.shape
    groups, length, _ = keys.shape
    shared = heads // groups
    # [KV, T * shared, D]: the rows of one key-value head are its queries, token after token.
    queries = q.to(torch.float32).view(tokens, groups, shared, dim).transpose(0, 1)
    keys, values = keys.to(torch.float32), values.to(torch.float32)
    positions = torch.arange(length, device=q.device)
    step = max(1, SCORE_BYTES // (4 * heads * length))
    parts = []
    for start in range(0, tokens, step):
        block = queries[:, start : start + step]
        count = block.shape[1]
        scores = block.reshape(groups, count * shared, dim) @ keys.transpose(1, 2) * scale
        if tokens > 1:
            seen = positions[length - tokens + start :][:count]
            hidden = positions > seen.repeat_interleave(shared).unsqueeze(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(-1) @ values
        parts.append(mixed.view(groups, count, shared, dim).transpose(0, 1).reshape(count, heads, dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
