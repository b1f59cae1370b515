"""The widening linears against the reference on a small weight of the same K, once per K, dtype and device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.widening import LinearCall, bind_fp8, bind_nvfp4

# An output rounds to 8 (bfloat16) or 11 bits; a wrong scale, nibble or layout is off by far more.
TOLERANCE = 4e-3
ROWS, TOKENS = 40, 3


@lru_cache(maxsize=256)
def probe_nvfp4(k: int, dtype: str, device: str) -> None:
    """Launch `linear_nvfp4_widening` on random codes with every positive block scale; raises where it is wrong."""
    source = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 256, (ROWS, k // 2), generator=source, dtype=torch.uint8)
    scales = (torch.arange(ROWS * (k // 16)) % 126 + 1).to(torch.uint8).reshape(ROWS, k // 16)
    weight = NVFP4Weight(
        codes=codes, block_scale=scales.view(torch.float8_e4m3fn), global_scale=torch.tensor(2.0**-9 / k)
    )
    _compare(bind_nvfp4, weight.to(device), dtype)


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
    ours, wanted = bind(weight)(x).float(), linear(x.float(), weight)
    error = _relative(ours, wanted)
    if not error < TOLERANCE:
        raise VtensorsError(
            "the self-test failed", seen=f"relative error {error:.1e}", accepted=f"{TOLERANCE}"
        )


def _relative(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())
