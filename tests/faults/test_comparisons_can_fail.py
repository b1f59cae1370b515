"""The comparisons by which weights and kernels are accepted fail on the classic mistakes, by a wide margin."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.records import Scheme
from vtensors_formats.nvfp4 import NVFP4Weight, quantize_nvfp4
from vtensors_formats.schemes import BUILTIN_SCHEMES
from vtensors_kernels.reference.linear import linear
from vtensors_plugins.testing import SchemeConformance, WeightExample

N, K = 48, 64
SCHEME: Scheme = next(scheme for scheme in BUILTIN_SCHEMES if scheme.name == "nvfp4")


def _sound(sense: str) -> NVFP4Weight:
    # Values of order one whose block scales all differ; the global scale is far from its reciprocal.
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(5))
    spread = torch.linspace(0.25, 4, N * K // 16).reshape(N, K // 16).repeat_interleave(16, 1)
    made = quantize_nvfp4(weight * spread)
    if sense == "multiplies":
        return made
    assert made.global_scale is not None
    return attrs.evolve(made, global_scale=None, global_divisor=1 / made.global_scale)


def _swapped_scales(weight: NVFP4Weight) -> NVFP4Weight:
    stored = weight.block_scale.view(torch.uint8)
    turned = stored.T.contiguous().reshape(stored.shape).view(torch.float8_e4m3fn)
    return attrs.evolve(weight, block_scale=turned)


def _missed_reciprocal(weight: NVFP4Weight) -> NVFP4Weight:
    return attrs.evolve(weight, global_scale=weight.global_divisor, global_divisor=weight.global_scale)


def _swapped_nibbles(weight: NVFP4Weight) -> NVFP4Weight:
    return attrs.evolve(weight, codes=(weight.codes >> 4) | (weight.codes << 4))


FAULTS = (_swapped_scales, _missed_reciprocal, _swapped_nibbles)


def _kit(weight: NVFP4Weight, expected: Tensor) -> Any:
    class Kit(SchemeConformance):
        scheme = SCHEME

        def weights(self) -> list[WeightExample]:
            return [WeightExample(weight=weight, expected=expected)]

    return Kit()


@pytest.mark.fault("B102")
@pytest.mark.parametrize("sense", ["multiplies", "divides"])
def test_the_conformance_kit_accepts_a_sound_weight_and_no_faulty_one(sense: str) -> None:
    sound = _sound(sense)
    expected = sound.dequantize(torch.float32)
    _kit(sound, expected).test_dequantize_is_exact_and_rounds_once()
    for fault in FAULTS:
        with pytest.raises(AssertionError, match="values differ"):
            _kit(fault(sound), expected).test_dequantize_is_exact_and_rounds_once()


@pytest.mark.fault("B102")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_faulty_kernel_is_far_outside_of_what_the_honest_one_differs_by(fault: Any) -> None:
    sound = _sound("multiplies")
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(6))
    wanted = (x.double() @ sound.dequantize(torch.float32).double().T).float()
    assert 0.1 < wanted.abs().mean() < 100  # Outputs of order one: no result hides below an absolute limit.
    assert _relative(linear(x, sound), wanted) < 1e-5
    assert _relative(linear(x, fault(sound)), wanted) > 0.5


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
