"""From launchers of [M, K] to the calls that ops are: any leading shape, a norm in front, the largest behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_kernels.compiling.launch import current_stream
from vtensors_kernels.nvfp4.wgmma import WgmmaWorkspace
from vtensors_kernels.reference.linear_argmax import argmax
from vtensors_kernels.steps.rms_norm import norm_rows, why_no_norm_kernel

Call = Callable[..., Tensor]


def for_op(op: str, linear: Call, normed: Call | None = None) -> Call:
    """The op's call from one of its launcher's that computes neither norm nor argmax.

    linear: (x, residual) for linear_add, else (x), of [M, K]. normed: (x, gain, eps), what linear gives for
    `norm_rows` of them; composed of both where it is None. Errors: those of linear.
    """
    if op.startswith("norm_"):
        return over_rows(normed or (lambda x, gain, eps: linear(norm_rows(x, gain, eps))))
    if op == "linear_argmax":
        return over_rows(lambda x: argmax(linear(x)))
    return over_rows(linear)


def require_norm(request: KernelRequest) -> None:
    """Raises VtensorsError where `for_op` would compute the norm in front otherwise than the streaming kernels do."""
    if not request.op.startswith("norm_") or request.shape is None:
        return
    dtype: torch.dtype = getattr(torch, request.dtype)
    reason = why_no_norm_kernel(request.shape[1], dtype, torch.device(request.device))
    if reason is not None:
        raise VtensorsError("the norm in front has no kernel", seen=reason)


def over_rows(call: Call) -> Call:
    """The call for x [..., K]: leading dimensions become rows, those of a residual of as many dimensions too."""

    def any_shape(x: Tensor, *rest: Any) -> Tensor:
        if x.dim() == 2:
            return call(x, *rest)
        flat = [
            value.reshape(-1, value.shape[-1])
            if isinstance(value, Tensor) and value.shape[:-1] == x.shape[:-1]
            else value
            for value in (x, *rest)
        ]
        y = call(*flat)
        return y.reshape(*x.shape[:-1], *y.shape[1:])

    return any_shape


def workspace_here(device: torch.device) -> WgmmaWorkspace:
    """The workspace that all layers on this device share which are bound on torch's current stream."""
    return _workspace(device, current_stream(device))


@lru_cache(maxsize=16)
def _workspace(device: torch.device, _stream: int) -> WgmmaWorkspace:
    return WgmmaWorkspace(device=device)
