"""The frequencies of a rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vtensors_plugins.architectures.decoder_config import Llama3Scaling, RopeConfig


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """[dim / 2] float32 on the CPU: theta^(-2i / dim), scaled where the rope type says so."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).to(torch.float32) / config.dim
    frequencies = 1.0 / config.theta**exponents
    return frequencies if config.llama3 is None else _llama3(frequencies, config.llama3)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths above positions / low are divided by factor, those below positions / high stay.

    Between the two a blend, linear in positions / wavelength (transformers 5.24, modeling_rope_utils.py).
    """
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (turns - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(turns < low, frequencies / scaling.factor, blended)
    return torch.where(turns > high, frequencies, scaled)
