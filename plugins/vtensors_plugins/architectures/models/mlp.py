"""The dense feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import attrs
from torch import Tensor

from vtensors_kernels.reference.swiglu import swiglu
from vtensors_plugins.architectures.build import LinearCall, Parts


@attrs.frozen(kw_only=True)
class Mlp:
    """One SwiGLU; also an expert."""

    gate_proj: LinearCall
    up_proj: LinearCall
    down_proj: LinearCall

    def __call__(self, x: Tensor) -> Tensor:
        """[M, hidden] -> [M, hidden]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def build_mlp(parts: Parts, place: str, *, bias: bool = False) -> Mlp:
    """The SwiGLU whose weights are `<place>.gate_proj`, `.up_proj` and `.down_proj`."""
    return Mlp(
        gate_proj=parts.linear(f"{place}.gate_proj", bias=bias),
        up_proj=parts.linear(f"{place}.up_proj", bias=bias),
        down_proj=parts.linear(f"{place}.down_proj", bias=bias),
    )
