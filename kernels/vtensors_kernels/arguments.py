"""What launchers of linears share: checks of the input and of what goes with it, and its pre-scale."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.alignment import aligned


def check_x(x: Tensor, *, k: int, dtype: torch.dtype) -> None:
    """Raises RequestError unless x is [M, K] of the dtype that the kernel was bound for."""
    if x.dim() != 2 or x.shape[1] != k or x.dtype != dtype:
        raise RequestError(
            "the input does not fit the weight",
            seen=f"{x.dtype} {list(x.shape)}",
            accepted=f"{dtype} [M, {k}]",
        )


def scaled_x(x: Tensor, pre_scale: Tensor | None) -> Tensor:
    """x [M, K] contiguous, times pre_scale [K] in float32 and rounded to x's dtype where there is one."""
    return x.contiguous() if pre_scale is None else (x.float() * pre_scale.float()).to(x.dtype)


def output_for(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A new tensor of that shape and dtype beside x, or `out`. Raises RequestError where that does not fit."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != x.device or not out.is_contiguous():
        raise RequestError(
            "the output does not fit",
            seen=f"{out.dtype} {list(out.shape)} on {out.device}, strides {out.stride()}",
            accepted=f"{dtype} {list(shape)} on {x.device}, contiguous",
        )
    return out


def residual_for(
    x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, residual: Tensor | None, *, wanted: bool
) -> Tensor | None:
    """The residual as kernels read it: contiguous, of the output's shape and dtype, beside x; None where not wanted.

    Raises RequestError where it does not fit, or where one is given but not wanted, or wanted but not given.
    """
    if (residual is not None) != wanted:
        raise RequestError("a residual goes with linear_add and with nothing else")
    if residual is None:
        return None
    check_residual(x, shape, dtype, residual)
    return residual.contiguous()


def check_residual(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, residual: Tensor) -> None:
    """Raises RequestError unless the residual has the output's shape and dtype and is beside x."""
    if tuple(residual.shape) != shape or residual.dtype != dtype or residual.device != x.device:
        raise RequestError(
            "the residual does not fit",
            seen=f"{residual.dtype} {list(residual.shape)} on {residual.device}",
            accepted=f"{dtype} {list(shape)} on {x.device}",
        )


def gain_for(k: int, device: torch.device, gain: Tensor | None, *, wanted: bool) -> Tensor | None:
    """A norm's gain as kernels read it: [K] float32 on the device, aligned to 16 bytes; None where not wanted.

    Raises RequestError where it does not fit, or where one is given but not wanted, or wanted but not given.
    """
    if (gain is not None) != wanted:
        raise RequestError("a gain goes with a norm and with nothing else")
    if gain is None:
        return None
    if gain.shape != (k,) or gain.dtype != torch.float32 or gain.device != device:
        raise RequestError(
            "the gain does not fit",
            seen=f"{gain.dtype} {list(gain.shape)} on {gain.device}",
            accepted=f"torch.float32 [{k}] on {device}",
        )
    return aligned(gain, 16)


def input_source(pre_scale: Tensor | None, *, norm: bool) -> str:
    """What x goes through before it is multiplied: `norm`, `pre_scale` or `plain`.

    Raises RequestError for a norm before a pre-scale: two roundings.
    """
    if norm and pre_scale is not None:
        raise RequestError("a pre-scale behind a norm rounds twice", fix="norm first, then the plain linear")
    return "norm" if norm else "plain" if pre_scale is None else "pre_scale"
