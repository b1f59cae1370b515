"""Mixture of experts with a shared expert; only experts that got a token are computed."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors_kernels.reference.router_topk import router_topk
from vtensors_plugins.architectures.build import LinearCall, Parts
from vtensors_plugins.architectures.decoder_config import MoeConfig
from vtensors_plugins.architectures.models.mlp import Expert, build_expert
from vtensors_plugins.architectures.models.norm import RMSNorm


@attrs.frozen(kw_only=True)
class Moe:
    """The router gives each token `chosen` experts; their weighted outputs and the gated shared one add."""

    chosen: int
    router: LinearCall
    experts: tuple[Expert, ...]
    shared_expert: Expert
    shared_expert_gate: LinearCall

    def __call__(self, h: Tensor, norm: RMSNorm) -> Tensor:
        """h + moe(norm(h)), [T, hidden]. Experts are summed in float32 in ascending order, rounded once."""
        x = norm(h)
        experts, weights = router_topk(self.router(x), self.chosen)
        shared = self.shared_expert_gate(x).to(torch.float32).sigmoid() * self.shared_expert(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, slots = (experts == expert).nonzero(as_tuple=True)
            weighted = self.experts[expert](x[tokens]) * weights[tokens, slots].unsqueeze(-1)
            out.index_add_(0, tokens, weighted)
        return h + (out + shared).to(h.dtype)


def build_moe(parts: Parts, config: MoeConfig, place: str) -> Moe:
    """The mixture below `<place>`: gate, experts, shared_expert and shared_expert_gate."""
    return Moe(
        chosen=config.chosen,
        router=parts.linear(f"{place}.gate"),
        experts=tuple(build_expert(parts, f"{place}.experts.{index}") for index in range(config.experts)),
        shared_expert=build_expert(parts, f"{place}.shared_expert"),
        shared_expert_gate=parts.linear(f"{place}.shared_expert_gate"),
    )
