"""E8M0: a power of two, 2^(byte - 127); byte 0xFF is NaN; no zero, no sign, no infinity.

OCP Microscaling Formats v1.0, section 5.4.1. On disk it is `U8` (nvidia-modelopt, compressed-tensors) or
`F8_E8M0`.
Bytes are always reinterpreted, never cast: casting byte 127 to a float gives 127.0, not 1.0.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from vtensors_formats.arithmetic import divide

BIAS = 127

# How a torch tensor may hold E8M0 bytes; torch has a dtype of its own for them since 2.7.
DTYPES: tuple[torch.dtype, ...] = tuple(
    dtype for dtype in (torch.uint8, getattr(torch, "float8_e8m0fnu", None)) if dtype is not None
)

NAN_BYTE = 0xFF
_LARGEST_BYTE = 0xFE

# floor(log2(448)): the exponent of the largest E4M3 value.
_E4M3_EXPONENT = 8


class ExponentRule(enum.Enum):
    """How the shared exponent of a block of E4M3 elements follows from its largest magnitude."""

    CEIL = "ceil"
    """ceil(log2(amax / 448)): nothing saturates. nvidia-modelopt 0.47 (qtensor/mxfp8_tensor.py)."""

    FLOOR = "floor"
    """floor(log2(amax)) - 8: amax may saturate. OCP Microscaling Formats v1.0, section 6.3."""

    FLOOR_ROUNDED = "floor-rounded"
    """As FLOOR, but a mantissa of 1.75 or more counts as 2. compressed-tensors 0.19 (utils/mxfp_utils.py)."""


def as_bytes(scale: Tensor) -> Tensor:
    """The stored bytes as uint8, same shape, no copy. scale: uint8 or float8_e8m0fnu."""
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def decode(scale: Tensor) -> Tensor:
    """Exact float32 values 2^(byte - 127), same shape; 0xFF gives NaN, byte 0 the subnormal 2^-127.

    scale: uint8 or float8_e8m0fnu, reinterpreted.
    """
    stored = as_bytes(scale).to(torch.int32)
    bits = stored << 23
    bits = torch.where(stored == 0, 0x0040_0000, bits)
    bits = torch.where(stored == NAN_BYTE, 0x7FC0_0000, bits)
    return bits.to(torch.int32).view(torch.float32)


def encode(amax: Tensor, rule: ExponentRule) -> Tensor:
    """uint8 scale bytes, same shape, for E4M3 blocks of largest magnitude amax (float, >= 0).

    Exact for every float32 (the exponent is taken from the bits, no logarithm is rounded). Zero gives byte 0,
    infinity the largest scale, NaN 0xFF.
    """
    amax = amax.to(torch.float32)
    if rule is ExponentRule.CEIL:
        mantissa, exponent = torch.frexp(divide(amax, 448.0))
        # frexp: value = mantissa * 2^exponent with mantissa in [0.5, 1), so only a power of two has 0.5.
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        mantissa, exponent = torch.frexp(amax)
        exponent = exponent - 1 - _E4M3_EXPONENT
        if rule is ExponentRule.FLOOR_ROUNDED:
            exponent = torch.where(mantissa >= 0.875, exponent + 1, exponent)
    stored = (exponent + BIAS).clamp(0, _LARGEST_BYTE)
    stored = torch.where(amax == 0, 0, stored)
    stored = torch.where(torch.isinf(amax), _LARGEST_BYTE, stored)
    stored = torch.where(torch.isnan(amax), NAN_BYTE, stored)
    return stored.to(torch.uint8)


def reciprocal(scale: Tensor) -> Tensor:
    """Exact float32 2^(127 - byte), same shape; for multiplying instead of dividing. NaN stays NaN."""
    stored = as_bytes(scale)
    flipped = torch.where(stored == NAN_BYTE, NAN_BYTE, _LARGEST_BYTE - stored)
    return decode(flipped.to(torch.uint8))


def first_above(scale: Tensor, byte: int) -> tuple[int, ...] | None:
    """Index of the first larger byte, or None. scale: uint8 or float8_e8m0fnu."""
    stored = as_bytes(scale)
    if stored.numel() == 0 or int(stored.max()) <= byte:
        return None
    return tuple(int(i) for i in (stored > byte).nonzero()[0])
