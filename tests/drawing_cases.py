"""Settings of draws, and which tokens float32 may take for each other: exact distributions in float64.

Import as `from drawing_cases import ...`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS = 2.0**-20
"""How far a point may lie from a boundary of the cumulative distribution, top_p from a sum of probabilities and min_p
from a ratio of two and be rounded to the other side: some roundings of float32 (exponential, quotients, sums)."""

SETTINGS: dict[str, tuple[float, int, float, float]] = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.3, 0, 1.0, 0.0),
    "hot": (7.0, 0, 1.0, 0.0),
    "k": (1.0, 20, 1.0, 0.0),
    "one": (1.0, 1, 1.0, 0.0),
    "every": (1.3, 10**6, 1.0, 0.0),
    "many": (2.0, 700, 1.0, 0.0),
    "p": (1.0, 0, 0.9, 0.0),
    "flat p": (50.0, 0, 0.7, 0.0),
    "least p": (1.0, 0, 1e-9, 0.0),
    "most p": (0.8, 0, 0.9999, 0.0),
    "m": (1.2, 0, 1.0, 0.03),
    "most m": (1.0, 0, 1.0, 1.0),
    "k and p": (1.5, 40, 0.6, 0.0),
    "many and p": (40.0, 900, 0.5, 0.0),
    "all": (2.0, 50, 0.9, 0.02),
    "coldest": (1e-30, 3, 0.5, 0.0),
    "colder": (1e-6, 0, 1.0, 0.0),
    "hottest": (1e30, 5, 1.0, 0.0),
    "hottest p": (1e38, 0, 0.25, 0.0),
}
"""temperature, top_k, top_p, min_p."""


def settings_of(name: str, point: float) -> Tensor:
    """[5] float64 as the kernel takes them."""
    return torch.tensor([*SETTINGS[name], point], dtype=torch.float64)


def rounding_allows(logits: Tensor, settings: Tensor, token: int) -> bool:
    """Whether the token is the one that is drawn, or one that `EPS` cannot tell from it.

    logits: [V], the largest finite. settings: [5].
    """
    temperature, top_k, top_p, min_p, point = settings.tolist()
    wide = logits.float()
    scores = ((wide - wide.max()) / max(temperature, 1e-30)).clamp(min=-200) + 1.0 - 1.0
    order = torch.sort(scores, descending=True, stable=True).indices
    weights = scores.double().exp()
    ordered = weights[order]
    if 0 < top_k < len(order):
        ordered[int(top_k) :] = 0
    ordered /= ordered.sum()
    before = torch.cumsum(ordered, 0) - ordered
    fewest = most = len(order)
    if top_p < 1:
        fewest = max(int((before < top_p - EPS).sum()), 1)
        most = int((before <= top_p + EPS).sum())
    for kept in range(fewest, most + 1, max((most - fewest) // 50, 1)):
        for least in (min_p * (1 - EPS), min_p * (1 + EPS)):
            left = ordered.clone()
            left[kept:] = 0
            left[1:][left[1:] < least * left[0]] = 0
            probs = torch.zeros_like(weights).scatter_(0, order, left)
            cumulative = torch.cumsum(probs, 0) / probs.sum()
            low = float(cumulative[token - 1]) if token else 0.0
            if probs[token] > 0 and low - EPS <= point <= float(cumulative[token]) + EPS:
                return True
    return False


def logits_like(kind: str, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[V]: a model's ("model"), with ties ("ties"), all alike ("flat"), or mostly -inf ("forbidden")."""
    generator = torch.Generator().manual_seed(1000 * columns + seed)
    rows = torch.randn(columns, generator=generator) * 2.5
    if kind == "ties":
        rows = (rows * 2).round() / 2
    if kind == "flat":
        rows = torch.full_like(rows, -3.5)
    if kind == "forbidden":
        rows[torch.rand(columns, generator=generator) < 0.9] = -math.inf
        rows[columns // 2] = 1.0
    return rows.to(dtype)
