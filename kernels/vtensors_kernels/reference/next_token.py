"""What greedy decoding does behind the head: the largest logit becomes the next token, the position moves on."""

from __future__ import annotations

import torch
from torch import Tensor


def next_token(logits: Tensor, tokens: Tensor, positions: Tensor, steps: Tensor, largest: Tensor) -> None:
    """In place, for each row b: tokens[b] = the lowest index of its largest logit, where steps[b] is not 0.

    logits: [B, V]. tokens: [B] int64. positions: [B] int32, steps [B] int32 are added. largest: [B] float32 becomes
    the logit. NaN ranks above every number: a row with one gives the first one's index and NaN.
    """
    wide = logits.to(torch.float32)
    nan = wide.isnan()
    comparable = torch.where(nan, float("-inf"), wide)
    largest_number = comparable == comparable.amax(-1, keepdim=True)
    best = torch.where(nan.any(-1, keepdim=True), nan, largest_number)
    columns = torch.arange(wide.shape[1], device=wide.device)
    index = torch.where(best, columns, wide.shape[1]).amin(-1)
    largest.copy_(wide.gather(1, index.unsqueeze(1)).squeeze(1))
    tokens.copy_(torch.where(steps != 0, index, tokens))
    positions.add_(steps)
