"""Small mixtures of experts for the tests: weights, packed on any device, and what their outputs are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_formats.weight import Weight
from vtensors_kernels.experts.packed import PackedExperts, check_experts, stacked
from vtensors_kernels.fp8.probes import random_fp8
from vtensors_kernels.nvfp4.probes import random_weight
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference
from vtensors_kernels.reference.nvfp4_packing import pack_reference
from vtensors_kernels.reference.swiglu import swiglu

SCHEMES = ("nvfp4", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8")


def random_experts(
    scheme: str,
    experts: int,
    hidden: int,
    width: int,
    *,
    shared: bool = False,
    device: str = "cpu",
    traits: frozenset[str] = frozenset(),
) -> list[Weight]:
    """gate, up, down of each expert in turn, each with a scale of its own."""
    weights: list[Weight] = []
    for index in range(experts + shared):
        for part, (n, k) in enumerate(((width, hidden), (width, hidden), (hidden, width))):
            request = KernelRequest(
                op="linear", scheme=scheme, activations="16bit", device=device, shape=(n, k), traits=traits
            )
            seed, factor = 3 * index + part, 0.75 ** (index % 5)
            if scheme == "nvfp4":
                weights.append(random_weight(request, n, seed=seed, scale_factor=factor))
            else:
                weights.append(random_fp8(request, n, seed=seed, scale_factor=factor))
    return weights


def packed_reference(weights: Sequence[Weight], experts: int) -> PackedExperts:
    """What `pack_experts` gives, on the device of the weights."""
    check_experts(weights, experts)
    gate, up, down = (stacked(weights[i::3]) for i in range(3))
    pack = pack_reference if weights[0].scheme == "nvfp4" else pack_fp8_reference
    return PackedExperts(
        gate_up=pack([gate, up], paired=True),  # type: ignore[operator]
        down=pack([down], paired=False),  # type: ignore[operator]
        experts=experts,
        shared=len(weights) > 3 * experts,
    )


def random_choice(m: int, experts: int, top: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """chosen [M, top] int32, different experts for each token, and weights [M, top] float32."""
    source = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(experts, generator=source)[:top] for _ in range(m)])
    weights = torch.rand(m, top, generator=source) + 0.1
    return chosen.to(torch.int32), weights / weights.sum(-1, keepdim=True)


def outputs(
    weights: Sequence[Weight],
    experts: int,
    x: Tensor,
    chosen: Tensor,
    router: Tensor,
    gate: Tensor | None = None,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """[M, K] float32, activations rounded to x's dtype between gate_up and down, nothing else rounded."""
    wide = [weight.dequantize(torch.float32) for weight in weights]

    def expert(index: int, rows: Tensor) -> Tensor:
        g, u, d = wide[3 * index : 3 * index + 3]
        act = swiglu(rows.float() @ g.T, rows.float() @ u.T).to(x.dtype)
        return act.float() @ d.T

    out = torch.zeros(x.shape, device=x.device)
    for token in range(x.shape[0]):
        for slot in range(chosen.shape[1]):
            out[token] += router[token, slot] * expert(int(chosen[token, slot]), x[token : token + 1])[0]
    weight = torch.ones(x.shape[0], 1, device=x.device)
    if gate is not None:
        weight = gate.float().reshape(-1, 1).sigmoid()
    if len(weights) > 3 * experts:
        out += weight * expert(experts, x)
    if shared is not None:
        out += weight * shared.float()
    return out if residual is None else out + residual.float()
