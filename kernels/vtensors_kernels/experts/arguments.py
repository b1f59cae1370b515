"""What a call of the grouped experts is given, checked: shapes, formats, device and alignment."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.alignment import aligned
from vtensors_kernels.experts.packed import PackedExperts


def checked_inputs(
    packed: PackedExperts, dtype: torch.dtype, x: Tensor, chosen: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] of the dtype, chosen [M, top] as int32, weights [M, top] float32, all contiguous on the experts' device.

    Errors: RequestError where they do not fit.
    """
    k, device = packed.hidden, packed.gate_up.blocks.device
    if x.dim() != 2 or x.shape[1] != k or x.dtype != dtype or x.device != device:
        raise RequestError(
            "the input does not fit the experts",
            seen=f"{x.dtype} {list(x.shape)} on {x.device}",
            accepted=f"{dtype} [M, {k}] on {device}",
        )
    shape = x.shape[0], chosen.shape[-1]
    fits = chosen.shape == shape and weights.shape == shape and 1 <= shape[1] <= packed.experts
    kinds = chosen.dtype in (torch.int32, torch.int64) and weights.dtype == torch.float32
    if not fits or not kinds or chosen.device != device or weights.device != device:
        raise RequestError(
            "the choice of experts does not fit",
            seen=f"{chosen.dtype} {list(chosen.shape)} on {chosen.device}, "
            f"{weights.dtype} {list(weights.shape)} on {weights.device}",
            accepted=f"int32 or int64, and float32, [{x.shape[0]}, top] on {device}, top 1..{packed.experts}",
        )
    return aligned(x, 16), aligned(chosen.to(torch.int32), 4), aligned(weights, 4)


def checked_rows(
    packed: PackedExperts, dtype: torch.dtype, tensor: Tensor | None, m: int, what: str
) -> Tensor | None:
    """The tensor as [m, K] contiguous, or None. Errors: RequestError where it does not fit."""
    if tensor is None:
        return None
    k, device = packed.hidden, packed.gate_up.blocks.device
    if tensor.dtype != dtype or tensor.device != device or tensor.numel() != m * k:
        raise RequestError(
            f"the {what} does not fit",
            seen=f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
            accepted=f"{dtype} [{m}, {k}] on {device}",
        )
    return aligned(tensor, 8).reshape(m, k)


def checked_column(packed: PackedExperts, dtype: torch.dtype, gate: Tensor | None, m: int) -> Tensor | None:
    """The gate, [m] or [m, 1], as [m] where it lies, or None: a copy would stand between two dependent launches.

    Errors: RequestError where it does not fit.
    """
    if gate is None:
        return None
    device = packed.gate_up.blocks.device
    if gate.dtype != dtype or gate.device != device or gate.shape not in ((m,), (m, 1)):
        raise RequestError(
            "the gate does not fit",
            seen=f"{gate.dtype} {list(gate.shape)} on {gate.device}",
            accepted=f"{dtype} [{m}] or [{m}, 1] on {device}",
        )
    return gate if gate.dim() == 1 else gate[:, 0]
