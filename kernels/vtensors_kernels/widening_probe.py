"""The widening linears against the reference on small weights of the same K, once per K, dtype, device and traits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import FP8Weight
from vtensors_formats.weight import Weight
from vtensors_kernels.nvfp4.probes import random_weight
from vtensors_kernels.nvfp4.row_probe import RowCase, reference
from vtensors_kernels.probing import TOLERANCES, random_x
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.widening import LinearCall, bind_fp8, bind_nvfp4

# An output rounds to 8 (bfloat16) or 11 bits; a wrong scale, nibble or layout is off by far more.
TOLERANCE = 4e-3
ROWS, TOKENS = 40, 3


def probe_nvfp4(request: KernelRequest) -> None:
    """Launch `linear_nvfp4_widening` for the request's K, traits, dtype and device; raises where it is wrong.

    Scales of every size lie beside each other in one weight; in another each row has those of one size.
    """
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    _probe_nvfp4(request.shape[1], request.dtype, request.device, request.traits - {"shared"})


@lru_cache(maxsize=256)
def _probe_nvfp4(k: int, dtype: str, device: str, traits: frozenset[str]) -> None:
    request = KernelRequest(
        op="linear", scheme="nvfp4", activations="16bit", device=device, dtype=dtype, shape=(ROWS, k),
        parts=(ROWS,), traits=traits,
    )  # fmt: skip
    # A bias is added to what was rounded already.
    accepted = TOLERANCES[getattr(torch, dtype)] * (2 if "bias" in traits else 1)
    weight, x = random_weight(request, ROWS), random_x(request, TOKENS)
    _require_close(bind_nvfp4(weight)(x), reference(x, weight), accepted)
    case = RowCase.make(request)
    case.check(bind_nvfp4(case.parts[0])(case.x), accepted, "rows of different sizes")


@lru_cache(maxsize=256)
def probe_fp8(k: int, scheme: str, dtype: str, device: str) -> None:
    """Launch `linear_fp8_widening` on every E4M3 code without NaN; raises where it is wrong."""
    codes = (torch.arange(ROWS * k) % 254).to(torch.uint8)
    codes = codes + (codes >= 0x7F)
    scale = torch.linspace(0.5, 1.5, ROWS).reshape(-1, 1) / k
    weight = FP8Weight(
        codes=codes.reshape(ROWS, k).view(torch.float8_e4m3fn),
        scale=scale if scheme == "fp8-row" else torch.tensor(1.0 / k),
    )
    _compare(bind_fp8, weight.to(device), dtype)


def _compare(bind: Callable[[Any], LinearCall], weight: Weight, dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = torch.linspace(-3, 3, TOKENS * weight.shape[1]).cos().reshape(TOKENS, -1).to(kind).to(weight.device)
    _require_close(bind(weight)(x), linear(x.float(), weight), TOLERANCE)


def _require_close(ours: Tensor, wanted: Tensor, accepted: float) -> None:
    error = float((ours.float() - wanted).norm() / wanted.norm())
    # Written so that NaN fails.
    if not error < accepted:
        raise VtensorsError(
            "the self-test failed", seen=f"relative error {error:.1e}", accepted=f"{accepted}"
        )
