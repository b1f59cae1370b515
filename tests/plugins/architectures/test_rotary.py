"""Rotary frequencies."""

from __future__ import annotations

import math

import torch

from vtensors_plugins.architectures.decoder_config import Llama3Scaling, RopeConfig
from vtensors_plugins.architectures.models.rotary import inverse_frequencies


def test_frequencies_are_powers_of_theta() -> None:
    ours = inverse_frequencies(RopeConfig(dim=8, theta=10000.0))
    torch.testing.assert_close(ours, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
    plain = inverse_frequencies(RopeConfig(dim=128, theta=500000.0))
    ours = inverse_frequencies(RopeConfig(dim=128, theta=500000.0, llama3=scaling))
    for frequency, scaled in zip(plain.tolist(), ours.tolist(), strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert math.isclose(scaled, expected, rel_tol=1e-5)
    assert 0 < int((ours == plain).sum()) < 64
