"""Scales that look inverted: what is warned of, and weights that nobody checked before."""

from __future__ import annotations

import logging

import pytest
import torch

from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_plugins.architectures.scale_doubts import ScaleDoubts


def nvfp4(divisor: float) -> NVFP4Weight:
    return NVFP4Weight(
        codes=torch.zeros(2, 8, dtype=torch.uint8),
        block_scale=torch.ones(2, 1).to(torch.float8_e4m3fn),
        global_divisor=torch.tensor(divisor),
    )


def fp8(scale: float) -> FP8Weight:
    return FP8Weight(codes=torch.zeros(2, 16).to(torch.float8_e4m3fn), scale=torch.tensor(scale))


@pytest.mark.parametrize(
    ("weight", "warned"),
    [
        (nvfp4(2688.0), False),
        (nvfp4(0.5), True),
        (nvfp4(0.0), True),
        (fp8(0.01), False),
        (fp8(1.0), False),
        (fp8(64.0), True),
    ],
)
def test_only_scales_above_one_are_doubted_and_a_divisor_of_zero_is_one(
    weight: NVFP4Weight | FP8Weight, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vtensors"):
        ScaleDoubts().look("layers.0.mlp.down_proj", weight)
    assert bool(caplog.records) == warned
