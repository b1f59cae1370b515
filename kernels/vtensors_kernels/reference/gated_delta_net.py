"""What a gated delta net does between its projections: convolution, delta rule, gated norm."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from vtensors_kernels.reference.causal_conv1d import causal_conv1d
from vtensors_kernels.reference.gated_delta_rule import recurrent
from vtensors_kernels.reference.gated_rms_norm import gated_rms_norm


@attrs.frozen(kw_only=True)
class GatedDeltaWeights:
    """What a layer has besides its projections, float32.

    conv: [C, W], C = 2 * HK * DK + HV * DV (q, k, v). decay: [HV], -exp(A_log). dt_bias: [HV]. norm: [DV], plain.
    """

    key_heads: int
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


def gated_delta_net(
    weights: GatedDeltaWeights, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, history: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y [T, HV * DV] in qkv's dtype, and the new history and memory; T tokens of one sequence, one after the other.

    qkv: [T, C]; z: [T, HV * DV]; b, a: [T, HV]; model dtype. history: [W - 1, C] in qkv's dtype, the raw inputs
    before, oldest first. memory: [HV, DK, DV] float32, not changed.
    """
    tokens, heads = b.shape
    mixed, history = causal_conv1d(qkv, weights.conv, history)
    key_dim, value_dim = memory.shape[1:]
    key_width = weights.key_heads * key_dim
    q, k, v = mixed.split_with_sizes((key_width, key_width, heads * value_dim), dim=-1)
    g = weights.decay * F.softplus(a.to(torch.float32) + weights.dt_bias)
    out, memory = recurrent(
        q.view(tokens, weights.key_heads, key_dim),
        k.view(tokens, weights.key_heads, key_dim),
        v.view(tokens, heads, value_dim),
        g,
        b.to(torch.float32).sigmoid(),
        memory,
    )
    gated = gated_rms_norm(out, z.reshape(tokens, heads, value_dim), weights.norm, weights.eps)
    return gated.view(tokens, heads * value_dim), history, memory
