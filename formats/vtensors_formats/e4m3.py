"""E4M3 "fn" (FP8): bias 7, largest finite 448, no infinity, NaN = 0x7F and 0xFF, smallest subnormal 2^-9.

OCP 8-bit Floating Point Specification v1.0, section 5; torch.float8_e4m3fn; safetensors `F8_E4M3`. Everything
but the two conversions works on the bytes, since few float8 operations exist on every backend and torch
version.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 448.0
MIN_SUBNORMAL = 2.0**-9

# Bytes looked at in one step, so that temporaries stay in the cache.
_CHUNK_BYTES = 4 << 20


def as_bytes(codes: Tensor) -> Tensor:
    """The stored bytes as uint8, same shape, no copy. codes: float8_e4m3fn or uint8."""
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """Exact float32 values, same shape. codes: float8_e4m3fn, or uint8 that holds such bytes."""
    typed = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    return typed.to(torch.float32)


def encode(values: Tensor) -> Tensor:
    """float8_e4m3fn of float values: nearest, ties to even, saturating at +-448; NaN stays NaN."""
    return values.to(torch.float32).clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def first_nan(codes: Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN code of a tensor of rank >= 1, or None. codes: float8_e4m3fn or uint8.

    Shifting the sign out makes both NaN bytes 0xFE, the largest value that any byte can then have.
    """
    stored = as_bytes(codes)
    if stored.numel() == 0:
        return None
    step = max(1, _CHUNK_BYTES * stored.shape[0] // stored.numel())
    for start in range(0, stored.shape[0], step):
        shifted = stored[start : start + step] << 1
        if int(shifted.max()) == 0xFE:
            first = [int(i) for i in (shifted == 0xFE).nonzero()[0]]
            return (start + first[0], *first[1:])
    return None


def is_zero(codes: Tensor) -> Tensor:
    """bool, same shape: True where a code is +0 or -0. codes: float8_e4m3fn or uint8."""
    return (as_bytes(codes) << 1) == 0
