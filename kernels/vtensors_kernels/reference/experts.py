"""A mixture of experts behind its router: the chosen experts' weighted outputs, with a shared one beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.swiglu import swiglu


def experts(
    x: Tensor,
    chosen: Tensor,
    router: Tensor,
    gate: Tensor | None,
    shared: Tensor | None,
    residual: Tensor | None,
    weights: Sequence[Weight],
    count: int,
    activations: Sequence[ActivationQuantizer | None] | None = None,
) -> Tensor:
    """[M, K] in x's dtype.

    x, residual: [M, K]. chosen: [M, top] integers; router: [M, top] float32. gate: [M, 1] or [M] logits of the shared
    expert's weight, None: 1. shared: [M, K], the shared expert's output where it is not among the weights.
    weights: gate (F, K), up (F, K), down (K, F) of `count` experts in turn, then of the shared one if it is among
    them. activations: the quantizer of each weight, None = 16 bit throughout.

    Outputs are weighted and summed in float32 in ascending order of experts, the shared one last, and rounded once;
    then the residual is added. Raises RequestError where the shared expert is given twice.
    """
    quantizers = activations or [None] * len(weights)
    if shared is not None and len(weights) > 3 * count:
        raise RequestError("the shared expert is among the weights; its output is not given")

    def expert(index: int, rows: Tensor) -> Tensor:
        first, up, down = ((weights[i], quantizers[i]) for i in (3 * index, 3 * index + 1, 3 * index + 2))
        return linear(swiglu(linear(rows, *first), linear(rows, *up)), *down)

    return weighted_sum(
        x,
        chosen,
        router,
        gate,
        expert(count, x) if len(weights) > 3 * count else shared,
        residual,
        expert,
    )


def weighted_sum(
    x: Tensor,
    chosen: Tensor,
    router: Tensor,
    gate: Tensor | None,
    shared: Tensor | None,
    residual: Tensor | None,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """`experts` of experts that are given as a function: index, rows of x -> their outputs; chosen ones are asked."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in sorted(set(chosen.flatten().tolist())):
        tokens, slots = (chosen == index).nonzero(as_tuple=True)
        out.index_add_(0, tokens, expert(index, x[tokens]) * router[tokens, slots].unsqueeze(-1))
    if shared is not None:
        weight = 1.0 if gate is None else gate.reshape(-1, 1).to(torch.float32).sigmoid()
        out = out + weight * shared
    rounded = out.to(x.dtype)
    return rounded if residual is None else residual + rounded
