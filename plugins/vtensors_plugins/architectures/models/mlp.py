"""The dense feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import attrs
from torch import Tensor

from vtensors_plugins.architectures.build import AddCall, NormedCall, Parts
from vtensors_plugins.architectures.models.mlp_kernels import MergedMlp, mlp_for
from vtensors_plugins.architectures.models.norm import RMSNorm


@attrs.frozen(kw_only=True)
class Mlp:
    """The SwiGLU of a dense layer. gate_up: silu(gate) * up behind the norm.

    merged: the same for a range of rows, whose products hand on what lies between them; None where there is none.
    """

    gate_up: NormedCall
    down_proj: AddCall
    merged: MergedMlp | None = None

    def __call__(self, h: Tensor, norm: RMSNorm) -> Tensor:
        """h + mlp(norm(h)), [M, hidden]."""
        if self.merged is not None and self.merged.serves(h):
            return self.merged(h, norm.gain, norm.eps)
        return self.down_proj(self.gate_up(h, norm), h)


def build_mlp(parts: Parts, place: str, *, bias: bool) -> Mlp:
    """The SwiGLU whose weights are `<place>.gate_proj`, `.up_proj` and `.down_proj`."""
    gate_up, first = parts.bound_norm_linear_swiglu(f"{place}.gate_proj", f"{place}.up_proj", bias=bias)
    down_proj, second = parts.bound_linear_add(f"{place}.down_proj", bias=bias)
    return Mlp(gate_up=gate_up, down_proj=down_proj, merged=mlp_for(first, second, parts))
