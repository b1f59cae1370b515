"""How exact a scheme can be on a given weight: the signal-to-noise ratio of rounding it to nearest.

Derivation, for Gaussian weights (tests/verification/test_reach.py measures the same):

E4M3 has three mantissa bits. In one binade [1, 2) the step is 1/8 and the error uniform, so its mean square is
(1/8)^2 / 12 = 1/768; the mean square of the values there is about 2.2 (7/3 if uniform, 3 / (2 ln 2) if
log-uniform): 10 log10(768 * 2.2) = 32 dB; values that fall among the subnormals cost half a decibel: 31.5 dB,
whatever the scale's granularity, which only moves the binades.
E2M1 scaled by a block of 16: the largest magnitude lies near 6 and the steps are 0.5 up to 2, 1 up to 4 and 2
up to 6; together with the rounding of the block's scale to E4M3 (up to 1/16) a Gaussian block gives 20.4 dB.
bfloat16 has seven mantissa bits: four more than E4M3, 6.02 dB each: 56 dB.
Real tensors differ (an outlier takes the range of its block), so the limit is measured on the reference itself:
its rows are encoded to nearest, with scales of their own, and decoded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vtensors_formats.fp8_quantize import quantize_fp8_block, quantize_fp8_row, quantize_fp8_tensor
from vtensors_formats.mxfp8 import quantize_mxfp8
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_formats.weight import Weight

# Scales that calibration chose otherwise (shared, clipped, powers of two) may cost this much.
MARGIN_DB = 3.0


def snr_db(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise) of sums of squares; None for no noise at all."""
    if noise == 0:
        return None
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def reach_db(scheme: str, values: Tensor, block: tuple[int, int]) -> float | None:
    """The ratio that rounding to nearest reaches on values; None where nothing is lost or nothing is known.

    values: float32 [N, K], some rows of the reference. block: rows and columns of a scale of `fp8-block`.
    """
    encoded = _encode(scheme, values, block)
    if encoded is None:
        return None
    error = encoded.dequantize(torch.float32) - values
    return snr_db(_squares(values), _squares(error))


def _encode(scheme: str, values: Tensor, block: tuple[int, int]) -> Weight | None:
    if values.ndim != 2 or not bool(torch.isfinite(values).all()):
        return None
    if scheme == "nvfp4" and values.shape[1] % 16 == 0:
        return quantize_nvfp4(values)
    if scheme == "mxfp8" and values.shape[1] % 32 == 0:
        return quantize_mxfp8(values)
    if scheme == "fp8-tensor":
        return quantize_fp8_tensor(values)
    if scheme == "fp8-row":
        return quantize_fp8_row(values)
    return quantize_fp8_block(values, block) if scheme == "fp8-block" else None


def _squares(values: Tensor) -> float:
    return float(values.double().square().sum())
