"""A token drawn from logits: temperature, top_k, top_p and min_p, then the inverse of the cumulative distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "point")
"""Columns of the settings of rows."""

_UNIT, _LEAST_SCORE, _LEAST_TEMPERATURE = 2.0**44, -200.0, 1e-30


def kept_masses(logits: Tensor, settings: Tensor) -> Tensor:
    """What the token is drawn from: [V] int64, the weight of every token that stays, 2^44 for the largest logit.

    logits: [V], the largest finite. settings: [5] float64, see `SETTINGS`; top_k 0, top_p 1 and min_p 0 are off,
    and top_p is above 0.
    A score is (logit - largest) / temperature, rounded as float32 rounds 1 + score; equal ones are in the order of ids.
    top_k, top_p and min_p work one after the other on what the one before has left, renormalized.
    """
    temperature, top_k, top_p, min_p, _ = settings.tolist()
    wide = logits.to(torch.float32)
    divisor = min(max(temperature, _LEAST_TEMPERATURE), torch.finfo(torch.float32).max)
    scores = ((wide - wide.max()) / divisor).clamp(min=_LEAST_SCORE) + 1.0 - 1.0
    weights = scores.exp()
    masses = (weights.to(torch.float64) * _UNIT).floor().to(torch.int64)
    order = torch.sort(scores, descending=True, stable=True).indices
    ordered = masses[order]
    if 0 < top_k < len(order):
        ordered[int(top_k) :] = 0
    if top_p < 1:
        before = torch.cumsum(ordered, dim=0) - ordered
        ordered[before >= math.ceil(top_p * float(ordered.sum()))] = 0
    kept = torch.zeros_like(masses).scatter_(0, order, ordered)
    return kept.masked_fill(weights < torch.tensor(min_p, dtype=torch.float32), 0)


def sample_token(logits: Tensor, settings: Tensor, largest: Tensor, steps: Tensor, tokens: Tensor) -> None:
    """In place, for each row b: tokens[b] = the first whose cumulative mass exceeds point * the sum of `kept_masses`.

    logits: [B, V]. settings: [B, 5] float64. largest: [B] float32, the largest logit. steps: [B] int32.
    tokens: [B] int64. A row keeps its token where the temperature or steps is 0, or the largest logit is not finite.
    """
    for row in range(logits.shape[0]):
        if settings[row, 0] > 0 and steps[row] != 0 and torch.isfinite(largest[row]):
            cumulative = torch.cumsum(kept_masses(logits[row], settings[row]), dim=0)
            whole = int(cumulative[-1])
            point = min(int(float(settings[row, 4]) * float(whole)), whole - 1)
            tokens[row] = int(torch.searchsorted(cumulative, point, right=True))
