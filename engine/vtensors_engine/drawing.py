"""Drawing a token: the distribution that settings leave of logits, and the inverse of its cumulative sum at a point."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

# Temperatures beyond these choose as these do; dividing by others would leave float32's range.
_SMALLEST_TEMPERATURE, _LARGEST_TEMPERATURE = 1e-30, torch.finfo(torch.float32).max
# No vocabulary is larger; a float64 of a device's settings holds it.
_LARGEST_TOP_K = 2**31 - 1


class Filters(Protocol):
    """What shapes a distribution, as `SamplingParams` explains it. temperature: above 0."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


@attrs.frozen(kw_only=True, slots=True)
class Draw:
    """All that decides which token is drawn from given logits. point: in [0, 1), of the cumulative distribution."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    point: float


def new_draw(filters: Filters, generator: torch.Generator) -> Draw:
    """The draw of the next token of a sequence; takes one number from its generator, whatever V and the device."""
    return Draw(
        temperature=filters.temperature,
        top_k=min(filters.top_k, _LARGEST_TOP_K),
        top_p=filters.top_p,
        min_p=filters.min_p,
        point=float(torch.rand((), generator=generator, dtype=torch.float64)),
    )


def drawn_token(logits: torch.Tensor, draw: Draw) -> int:
    """The first token whose cumulative probability exceeds the point. logits: [V], the largest finite."""
    probs = probabilities(logits, draw)
    cumulative = torch.cumsum(probs.to("cpu", torch.float64), dim=0)
    index = int(torch.searchsorted(cumulative, draw.point * cumulative[-1], right=True))
    if index < probs.numel():
        return index
    return int(probs.nonzero()[-1, 0])


def probabilities(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """What a token is drawn from at a temperature above 0. logits: [V] -> [V] float32 with sum 1."""
    scores = logits.to(torch.float32)
    temperature = min(max(filters.temperature, _SMALLEST_TEMPERATURE), _LARGEST_TEMPERATURE)
    scores = (scores - scores.max()) / temperature
    probs = torch.softmax(scores, dim=0)
    if filters.top_k or filters.top_p < 1:
        ordered, order = _candidates(probs, filters)
        if filters.top_k:
            ordered[filters.top_k :] = 0
            # Summed in its full length: the rounding must not depend on how many candidates there are.
            whole = torch.zeros_like(probs)
            whole[: len(ordered)] = ordered
            ordered /= whole.sum()
        # A token stays while those before it have not reached top_p; the first always stays.
        before = torch.cumsum(ordered, dim=0) - ordered
        if filters.top_p < 1:
            ordered[1:].masked_fill_(before[1:] >= filters.top_p, 0)
        probs = torch.zeros_like(probs).scatter_(0, order, ordered)
    if filters.min_p:
        probs = probs.masked_fill(probs < filters.min_p * probs.max(), 0)
    return probs / probs.sum()


def leading(values: torch.Tensor, floor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values [V] from floor on, the largest first, equal ones in the order of their ids; and their ids."""
    ids = (values >= floor).nonzero()[:, 0]
    ordered, order = torch.sort(values[ids], descending=True, stable=True)
    return ordered, ids[order]


def _candidates(probs: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """As `leading`, at least those that top_k and top_p leave; to sort a large vocabulary takes 20 ms."""
    if filters.top_k:
        return leading(probs, torch.topk(probs, min(filters.top_k, probs.numel())).values[-1])
    for fraction in (1e-2, 1e-4):
        found = leading(probs, probs.max() * fraction)
        # Beyond rounding, so that none behind them can count.
        if float(torch.cumsum(found[0], dim=0)[-1]) >= filters.top_p + 1e-6:
            return found
    return leading(probs, torch.zeros(()))
