"""The choice of experts: softmax over all, the k largest, ties to the lowest index, weights renormalized."""

from __future__ import annotations

import torch
from torch import Tensor


def router_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """experts [T, k] int64, largest first, and weights [T, k] float32, which sum to 1.

    logits: [T, E], already rounded to the model's dtype, which is where ties come from; a stable sort gives
    the lowest expert of a tie, which `topk` does not promise.
    """
    probabilities = logits.to(torch.float32).softmax(-1)
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = probabilities.gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True)
