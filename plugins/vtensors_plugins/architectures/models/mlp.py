"""The dense feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import attrs
from torch import Tensor

from vtensors_plugins.architectures.build import AddCall, NormedCall, Parts
from vtensors_plugins.architectures.models.norm import RMSNorm


@attrs.frozen(kw_only=True)
class Mlp:
    """The SwiGLU of a dense layer. gate_up: silu(gate) * up behind the norm."""

    gate_up: NormedCall
    down_proj: AddCall

    def __call__(self, h: Tensor, norm: RMSNorm) -> Tensor:
        """h + mlp(norm(h)), [M, hidden]."""
        return self.down_proj(self.gate_up(h, norm), h)


def build_mlp(parts: Parts, place: str, *, bias: bool) -> Mlp:
    """The SwiGLU whose weights are `<place>.gate_proj`, `.up_proj` and `.down_proj`."""
    return Mlp(
        gate_up=parts.norm_linear_swiglu(f"{place}.gate_proj", f"{place}.up_proj", bias=bias),
        down_proj=parts.linear_add(f"{place}.down_proj", bias=bias),
    )
