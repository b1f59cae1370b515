"""The gated delta net layer: projections, causal convolution, delta rule, gated norm."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from vtensors.errors import ArchitectureError
from vtensors_kernels.reference.causal_conv1d import causal_conv1d
from vtensors_kernels.reference.gated_delta_rule import gated_delta_rule
from vtensors_kernels.reference.gated_rms_norm import gated_rms_norm
from vtensors_plugins.architectures.build import LinearCall, Parts
from vtensors_plugins.architectures.decoder_config import DeltaNetConfig
from vtensors_plugins.architectures.models.state import DeltaNetState, KeyValueCache


@attrs.frozen(kw_only=True)
class GatedDeltaNet:
    """One delta net layer. The four input projections are separate: each has a scheme of its own.

    conv: [C, W] float32. decay: [HV] float32, -exp(A_log). dt_bias: [HV] float32. norm: [DV] float32, plain.
    """

    config: DeltaNetConfig
    in_proj_qkv: LinearCall
    in_proj_z: LinearCall
    in_proj_b: LinearCall
    in_proj_a: LinearCall
    out_proj: LinearCall
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float

    def new_state(self, dtype: torch.dtype, device: torch.device) -> DeltaNetState:
        """The state before the first token: zeros."""
        own = self.config
        return DeltaNetState(
            history=torch.zeros(own.taps - 1, own.channels, dtype=dtype, device=device),
            memory=torch.zeros(own.value_heads, own.key_dim, own.value_dim, device=device),
        )

    def __call__(self, x: Tensor, state: KeyValueCache | DeltaNetState, _cos: Tensor, _sin: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]; moves the state T tokens on."""
        if not isinstance(state, DeltaNetState):
            raise ArchitectureError("the state of another kind of layer was given to a delta net")
        own, tokens = self.config, x.shape[0]
        mixed, state.history = causal_conv1d(self.in_proj_qkv(x), self.conv, state.history)
        q, k, v = mixed.split_with_sizes((own.key_width, own.key_width, own.value_width), dim=-1)
        beta = self.in_proj_b(x).to(torch.float32).sigmoid()
        g = self.decay * F.softplus(self.in_proj_a(x).to(torch.float32) + self.dt_bias)
        out, state.memory = gated_delta_rule(
            q.view(tokens, own.key_heads, own.key_dim),
            k.view(tokens, own.key_heads, own.key_dim),
            v.view(tokens, own.value_heads, own.value_dim),
            g,
            beta,
            state.memory,
        )
        z = self.in_proj_z(x).view(tokens, own.value_heads, own.value_dim)
        return self.out_proj(gated_rms_norm(out, z, self.norm, self.eps).reshape(tokens, own.value_width))


def build_gated_delta_net(parts: Parts, config: DeltaNetConfig, eps: float, layer: int) -> GatedDeltaNet:
    """The delta net of that layer."""
    place = f"layers.{layer}.linear_attn"
    return GatedDeltaNet(
        config=config,
        in_proj_qkv=parts.linear(f"{place}.in_proj_qkv"),
        in_proj_z=parts.linear(f"{place}.in_proj_z"),
        in_proj_b=parts.linear(f"{place}.in_proj_b"),
        in_proj_a=parts.linear(f"{place}.in_proj_a"),
        out_proj=parts.linear(f"{place}.out_proj"),
        conv=parts.small(f"{place}.conv1d").squeeze(1),
        decay=-parts.small(f"{place}.A_log").exp(),
        dt_bias=parts.small(f"{place}.dt_bias"),
        norm=parts.small(f"{place}.norm"),
        eps=eps,
    )
