"""Tensors of a claim by role, cut to one expert's matrix where they are stacked; and common form pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vtensors.forms import FLOAT_DTYPES, TensorForm
from vtensors.records import Claim, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

PER_TENSOR = ("[]", "[1]")
PER_ROW = ("[N, 1]", "[N]")
PER_BLOCK = ("[ceil(N/BN), ceil(K/BK)]",)
BIAS = TensorForm(suffix="bias", dtypes=FLOAT_DTYPES, shapes=("[N]",), role="bias", required=False)
STACKED_BIAS = TensorForm(suffix="bias", dtypes=FLOAT_DTYPES, shapes=("[E, N]",), role="bias", required=False)
# Roles that hold one value per output row (or one per expert), unlike block scales.
_SCALARS = ("global_scale", "global_divisor", "input_scale", "input_divisor")


def read_roles(claim: Claim, source: TensorSource) -> dict[str, Tensor]:
    """role -> tensor of one matrix: codes [N, ...], scales as stored, scalars as []; views where possible."""
    tensors = {role: source.view(info) for role, info in claim.roles.items()}
    if claim.part is not None:
        tensors = {role: _cut(tensor, role, claim) for role, tensor in tensors.items()}
    return {
        role: tensor.reshape(()) if role in _SCALARS and tensor.numel() == 1 else tensor
        for role, tensor in tensors.items()
    }


def _cut(tensor: Tensor, role: str, claim: Claim) -> Tensor:
    part = claim.part
    if part is None or tensor.ndim == 0 or role == "pre_scale":
        return tensor
    if role in _SCALARS or (role == "scale" and claim.scheme == "fp8-tensor" and tensor.ndim < 3):
        # One for all experts, [1], or one each, [E] or [E, 1]: never cut by rows.
        return tensor.reshape(-1)[part.expert if tensor.numel() > 1 else 0]
    one = tensor[part.expert]
    if part.transposed and one.ndim == 2:
        one = one.transpose(0, 1).contiguous()
    if role == "scale" and claim.scheme in ("fp8-block", "fp8-tensor"):
        return one
    return one[part.row_begin : part.row_end]


def column(scale: Tensor) -> Tensor:
    """A per-row scale [N] or [N, 1] as [N, 1]."""
    return scale.reshape(-1, 1)


def static_scale(claim: Claim, roles: Mapping[str, Tensor]) -> Tensor | None:
    """The scale of the input, None where there is none or dynamic activations are declared, which do without.

    One that is not used must still be a scale, as in a weight-only module: a damaged file is refused either way.
    """
    scale = roles.get("input_scale")
    if scale is None or claim.declared is None or claim.declared.activations != "fp8-dynamic":
        return scale
    from vtensors_formats.values import require_positive

    require_positive(scale, tensor=claim.roles["input_scale"].name, what="input scale")
    return None
