"""E2M1 (FP4): one sign bit, two exponent bits, one mantissa bit; no infinity, no NaN.

Code = sign << 3 | magnitude index into 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats v1.0, 5.3.3).
Two codes share a byte: even k in the low nibble, odd k in the high one, as nvidia-modelopt 0.47
(quantization/qtensor/nvfp4_tensor.py) and compressed-tensors 0.19 (compressors/nvfp4/helpers.py) write them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MAX = 6.0

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES: tuple[float, ...] = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)

# Midpoints between neighbours. A value on a midpoint goes to the even index: down at 0.25, 1.25, 2.5 and 5,
# up at 0.75, 1.75 and 3.5. Those three are lowered by one float32 step, so that "greater than" takes the
# midpoint in.
_ULP_BELOW = 2.0**-24
_MIDPOINTS = (
    0.25,
    0.75 - _ULP_BELOW,
    1.25,
    1.75 - 2 * _ULP_BELOW,
    2.5,
    3.5 - 4 * _ULP_BELOW,
    5.0,
)

# One row per byte: the values of its low and its high nibble.
_PAIRS = tuple((VALUES[byte & 0xF], VALUES[byte >> 4]) for byte in range(256))


def decode(packed: Tensor) -> Tensor:
    """float32 values [..., K] of packed codes.

    packed: [..., K // 2] uint8, low nibble = even k. Code 8 gives -0.0.
    """
    pairs = torch.nn.functional.embedding(packed.to(torch.int32), _pair_table(packed.device))
    return pairs.flatten(-2)


@lru_cache(maxsize=16)
def _pair_table(device: torch.device) -> Tensor:
    """float32 [256, 2] on the device, made once: a layer decodes its weight at every use."""
    with torch.inference_mode(False):
        return torch.tensor(_PAIRS, dtype=torch.float32, device=device)


def decode_codes(codes: Tensor) -> Tensor:
    """float32 values of unpacked codes. codes: any shape, uint8 0..15."""
    table = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int32)]


def encode(values: Tensor) -> Tensor:
    """Unpacked codes, uint8 0..15, of float values of any shape: nearest, ties to the even code, saturating
    at 6.

    The sign bit is kept, so -0.0 and what rounds to it give code 8. There is no code for NaN: it becomes a 6,
    so callers must not lose it silently (a NaN makes a NaN block scale, see `activations`).
    """
    values = values.to(torch.float32)
    midpoints = torch.tensor(_MIDPOINTS, dtype=torch.float32, device=values.device)
    magnitude = torch.bucketize(values.abs(), midpoints, out_int32=True).to(torch.uint8)
    return magnitude | (torch.signbit(values).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """[..., K // 2] uint8 of codes [..., K] uint8 0..15 with even K; low nibble = even k."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """[..., K] uint8 codes 0..15 of packed [..., K // 2] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
