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
from vtensors_plugins.architectures.build import AddCall, LinearsCall, Parts
from vtensors_plugins.architectures.decoder_config import DeltaNetConfig
from vtensors_plugins.architectures.models.norm import RMSNorm
from vtensors_plugins.architectures.models.state import DeltaNetState, KeyValueCache


@attrs.frozen(kw_only=True)
class GatedDeltaNet:
    """One delta net layer. qkvz: in_proj_qkv and in_proj_z; ba: in_proj_b and in_proj_a.

    conv: [C, W] float32. decay: [HV] float32, -exp(A_log). dt_bias: [HV] float32. norm: [DV] float32, plain.
    """

    config: DeltaNetConfig
    qkvz: LinearsCall
    ba: LinearsCall
    out_proj: AddCall
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

    def __call__(
        self, h: Tensor, norm: RMSNorm, state: KeyValueCache | DeltaNetState, _cos: Tensor, _sin: Tensor
    ) -> Tensor:
        """h + delta_net(norm(h)), [T, hidden]; moves the state T tokens on."""
        if not isinstance(state, DeltaNetState):
            raise ArchitectureError("the state of another kind of layer was given to a delta net")
        own, tokens = self.config, h.shape[0]
        # One norm for two ops, so that neither computes it again.
        x = norm(h)
        qkv, z = self.qkvz(x)
        b, a = self.ba(x)
        mixed, state.history = causal_conv1d(qkv, self.conv, state.history)
        q, k, v = mixed.split_with_sizes((own.key_width, own.key_width, own.value_width), dim=-1)
        beta = b.to(torch.float32).sigmoid()
        g = self.decay * F.softplus(a.to(torch.float32) + self.dt_bias)
        out, state.memory = gated_delta_rule(
            q.view(tokens, own.key_heads, own.key_dim),
            k.view(tokens, own.key_heads, own.key_dim),
            v.view(tokens, own.value_heads, own.value_dim),
            g,
            beta,
            state.memory,
        )
        gate = z.view(tokens, own.value_heads, own.value_dim)
        gated = gated_rms_norm(out, gate, self.norm, self.eps)
        return self.out_proj(gated.reshape(tokens, own.value_width), h)


def build_gated_delta_net(parts: Parts, config: DeltaNetConfig, eps: float, layer: int) -> GatedDeltaNet:
    """The delta net of that layer."""
    place = f"layers.{layer}.linear_attn"
    return GatedDeltaNet(
        config=config,
        qkvz=parts.linears([f"{place}.in_proj_qkv", f"{place}.in_proj_z"]),
        ba=parts.linears([f"{place}.in_proj_b", f"{place}.in_proj_a"]),
        out_proj=parts.linear_add(f"{place}.out_proj"),
        conv=parts.small(f"{place}.conv1d").squeeze(1),
        decay=-parts.small(f"{place}.A_log").exp(),
        dt_bias=parts.small(f"{place}.dt_bias"),
        norm=parts.small(f"{place}.norm"),
        eps=eps,
    )
