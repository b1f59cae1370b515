"""Grouped experts on a CUDA device for the tests: what a call is given, made, and what it should give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from experts_cases import random_choice
from nvfp4_cuda_cases import TOLERANCE
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.swiglu import swiglu

if TYPE_CHECKING:
    from vtensors_kernels.experts.form import ExpertsTuning
    from vtensors_kernels.experts.launches import GroupedExperts


def bound(
    weights: list[Weight], experts: int, dtype: torch.dtype, tuning: ExpertsTuning | None = None
) -> GroupedExperts:
    from vtensors_kernels.experts.launches import GroupedExperts
    from vtensors_kernels.experts.packed import pack_experts

    return GroupedExperts(pack_experts(weights, experts), dtype, tuning)


@attrs.frozen
class Inputs:
    """x, gate, shared, residual of M tokens; chosen and router."""

    x: Tensor
    chosen: Tensor
    router: Tensor
    gate: Tensor
    shared: Tensor | None
    residual: Tensor

    @classmethod
    def make(
        cls, m: int, hidden: int, experts: int, top: int, dtype: torch.dtype, *, shared: bool = False
    ) -> Inputs:
        """shared: whether the shared expert's output is given beside."""
        source = torch.Generator().manual_seed(m + hidden)
        x, wide, beside, residual = (
            torch.randn(m, columns, generator=source).to(dtype).cuda()
            for columns in (hidden, 3, hidden, hidden)
        )
        gate = wide[:, 1:2]  # of wider rows, as a router's linear makes it
        chosen, router = random_choice(m, experts, top, seed=m)
        return cls(x, chosen.cuda(), router.cuda(), gate, beside if shared else None, residual)

    def tokens(self, first: int, count: int) -> Inputs:
        """Some of the tokens, copied."""
        part = slice(first, first + count)
        kept = (t if t is None else t[part].clone() for t in attrs.astuple(self, recurse=False))
        return Inputs(*kept)  # type: ignore[arg-type]


def called(call: GroupedExperts, given: Inputs) -> Tensor:
    """[M, K], the output poisoned before."""
    out = torch.full(given.x.shape, float("nan"), dtype=given.x.dtype, device="cuda")
    call(given.x, given.chosen, given.router, given.gate, given.shared, given.residual, out)
    assert not out.isnan().any()
    return out


def reference(weights: list[Weight], experts: int, given: Inputs) -> Tensor:
    """[M, K] float32, the activations rounded and nothing else."""
    out, weight = given.residual.float(), given.gate.float().sigmoid()
    for index in range(len(weights) // 3):
        gate, up, down = (part.dequantize(torch.float32) for part in weights[3 * index : 3 * index + 3])
        act = swiglu(given.x.float() @ gate.T, given.x.float() @ up.T).to(given.x.dtype)
        own = (given.router * (given.chosen == index)).sum(-1, keepdim=True) if index < experts else weight
        out = out + own * (act.float() @ down.T)
    return out if given.shared is None else out + weight * given.shared.float()


def check(ours: Tensor, wanted: Tensor) -> None:
    error = (ours.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.max()) < 2 * TOLERANCE[ours.dtype], (
        f"token {int(error.argmax())}: {float(error.max()):.1e}"
    )
