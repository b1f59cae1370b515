"""Mixture of experts with a shared expert; only experts that got a token are computed."""

from __future__ import annotations

import attrs
from torch import Tensor

from vtensors_plugins.architectures.build import ExpertsCall, LinearsCall, Parts
from vtensors_plugins.architectures.decoder_config import MoeConfig
from vtensors_plugins.architectures.models.norm import RMSNorm
from vtensors_plugins.architectures.models.router_kernels import Router, Topk, router_for, topk_for


@attrs.frozen(kw_only=True)
class Moe:
    """The router gives each token `chosen` of `expert_count` experts; their outputs and the gated shared one add.

    gates: gate, whose outputs are the router's logits, and shared_expert_gate. topk: chooses by the logits. router:
    norm, gates and topk in one launch, for few tokens; None where there is none.
    """

    expert_count: int
    chosen: int
    gates: LinearsCall
    topk: Topk
    router: Router | None
    experts: ExpertsCall

    def __call__(self, h: Tensor, norm: RMSNorm) -> Tensor:
        """h + moe(norm(h)), [T, hidden]. Experts are summed in float32; the reference does it in ascending order."""
        if self.router is not None and self.router.serves(h):
            x, chosen, weights, shared = self.router(h, norm.gain, norm.eps)
        else:
            x = norm(h)
            logits, shared = self.gates(x)
            chosen, weights = self.topk(logits)
        return self.experts(x, chosen, weights, shared, h)


def build_moe(parts: Parts, config: MoeConfig, place: str) -> Moe:
    """The mixture below `<place>`: gate, experts, shared_expert and shared_expert_gate."""
    gates, bound = parts.bound_linears([f"{place}.gate", f"{place}.shared_expert_gate"])
    topk = topk_for(config.experts, config.chosen, parts.options)
    return Moe(
        expert_count=config.experts,
        chosen=config.chosen,
        gates=gates,
        topk=topk,
        router=router_for(bound, topk, config, parts),
        experts=parts.experts(
            [f"{place}.experts.{index}" for index in range(config.experts)],
            chosen=config.chosen,
            shared=f"{place}.shared_expert",
        ),
    )
