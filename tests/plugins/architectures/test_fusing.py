"""Which weights may become one fused weight, and which never do."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from vtensors_formats import (
    FP4Activation,
    FP8GroupActivation,
    FP8StaticActivation,
    FP8TokenActivation,
    FP8Weight,
    PlainWeight,
    Weight,
)
from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.fp8_quantize import quantize_fp8_tensor
from vtensors_formats.nvfp4 import NVFP4Weight, quantize_nvfp4
from vtensors_plugins.architectures.fusing import Part, assumptions, traits_of, why_apart

GENERATOR = torch.Generator().manual_seed(0)
NVFP4 = quantize_nvfp4(torch.randn(16, 64, generator=GENERATOR))
OTHER = quantize_nvfp4(100 * torch.randn(8, 64, generator=GENERATOR))
FP8 = quantize_fp8_tensor(torch.randn(8, 64, generator=GENERATOR))


def _with_group_32(weight: NVFP4Weight) -> NVFP4Weight:
    return attrs.evolve(
        weight, block_scale=weight.block_scale.view(torch.uint8)[:, ::2].view(torch.float8_e4m3fn)
    )


def _parts(*weights: Weight, executed: tuple[str, ...] = ()) -> list[Part]:
    modes = executed or ("16bit",) * len(weights)
    return [
        Part(name=f"part{i}", weight=weight, executed=mode)
        for i, (weight, mode) in enumerate(zip(weights, modes, strict=True))
    ]


def _static(value: float) -> ActivationQuantizer:
    return FP4Activation(global_scale=torch.tensor(value))


def test_parts_of_one_scheme_are_fused_whatever_their_global_scales() -> None:
    assert float(NVFP4.global_scale or 0) != float(OTHER.global_scale or 0)
    assert why_apart(_parts(NVFP4, OTHER)) is None
    divided = NVFP4Weight(codes=OTHER.codes, block_scale=OTHER.block_scale, global_divisor=torch.tensor(64.0))
    assert why_apart(_parts(NVFP4, divided)) is None


SCALES = torch.ones(64)
APART: dict[str, tuple[Weight, Weight, str]] = {
    "scheme": (NVFP4, FP8, "part0 is nvfp4, part1 is fp8-tensor"),
    "dtype": (
        PlainWeight(tensor=torch.ones(2, 64)),
        PlainWeight(tensor=torch.ones(2, 64, dtype=torch.float16)),
        "part0 is f32, part1 is f16",
    ),
    "columns": (PlainWeight(tensor=torch.ones(2, 64)), PlainWeight(tensor=torch.ones(2, 32)), "K ="),
    "group": (NVFP4, _with_group_32(OTHER), "a scale per 16, part1 per 32"),
    "one-pre-scale": (attrs.evolve(NVFP4, pre_scale=SCALES), OTHER, "pre-scales"),
    "pre-scales": (
        attrs.evolve(NVFP4, pre_scale=SCALES),
        attrs.evolve(OTHER, pre_scale=2 * SCALES),
        "pre-scales of part0 and part1 differ",
    ),
    "bias": (attrs.evolve(NVFP4, bias=torch.ones(16)), OTHER, "only one of part0 and part1 has a bias"),
    "blocks": (
        FP8Weight(codes=FP8.codes, scale=torch.ones(1, 2), block=(128, 32)),
        FP8Weight(codes=FP8.codes, scale=torch.ones(1, 1), block=(128, 64)),
        "(128, 32)",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_parts_that_differ_where_x_or_the_layout_is_concerned_stay_apart(case: str) -> None:
    first, second, reason = APART[case]
    assert reason in str(why_apart(_parts(first, second)))
    assert why_apart(_parts(first, first, second)) is not None
    assert why_apart(_parts(first, first)) is None


QUANTIZERS: dict[str, tuple[Any, Any, bool]] = {
    "equal": (_static(0.5), _static(0.5), True),
    "scales": (_static(0.5), _static(0.25), False),
    "senses": (_static(0.5), FP4Activation(global_divisor=torch.tensor(0.5)), False),
    "kinds": (_static(0.5), FP8StaticActivation(scale=torch.tensor(0.5)), False),
    "one": (_static(0.5), None, False),
    "token": (FP8TokenActivation(), FP8TokenActivation(), True),
    "groups": (FP8GroupActivation(group=128), FP8GroupActivation(group=64), False),
}


@pytest.mark.parametrize("case", QUANTIZERS)
def test_input_scales_count_only_where_activations_are_quantized(case: str) -> None:
    first, second, alike = QUANTIZERS[case]
    weights = attrs.evolve(NVFP4, activation=first), attrs.evolve(OTHER, activation=second)
    assert why_apart(_parts(*weights)) is None
    assert (why_apart(_parts(*weights, executed=("fp4", "fp4"))) is None) is alike
    assert "activations" in str(why_apart(_parts(*weights, executed=("fp4", "16bit"))))


def test_a_kernel_is_told_of_everything_that_it_may_have_to_refuse() -> None:
    assert traits_of(_parts(NVFP4), shared=False) == frozenset()
    assert traits_of(_parts(NVFP4), shared=True) == {"shared"}
    assert traits_of(_parts(NVFP4, OTHER), shared=False) == {"row_scale"}
    assert traits_of(_parts(FP8, FP8), shared=False) == {"row_scale"}
    per_row = attrs.evolve(NVFP4, global_scale=torch.ones(16, 1))
    assert traits_of(_parts(per_row), shared=False) == {"row_scale"}
    assert traits_of(_parts(_with_group_32(NVFP4)), shared=False) == {"group32"}
    full = attrs.evolve(NVFP4, bias=torch.ones(16), pre_scale=SCALES)
    assert traits_of(_parts(full), shared=False) == {"bias", "pre_scale"}
    blocks = FP8Weight(codes=FP8.codes, scale=torch.ones(1, 2), block=(128, 32))
    assert traits_of(_parts(blocks), shared=False) == {"block128x32"}
    assert (
        traits_of(_parts(attrs.evolve(blocks, scale=torch.ones(1, 1), block=(128, 128))), shared=False)
        == frozenset()
    )
    plain = PlainWeight(tensor=torch.ones(2, 64))
    assert traits_of(_parts(plain, plain), shared=False) == frozenset()


def test_what_cannot_be_compared_without_data_is_said() -> None:
    first = attrs.evolve(NVFP4, pre_scale=SCALES, activation=_static(0.5)).to("meta")
    second = attrs.evolve(OTHER, pre_scale=2 * SCALES, activation=_static(0.25)).to("meta")
    parts = _parts(first, second, executed=("fp4", "fp4"))
    assert why_apart(parts) is None
    assert assumptions(parts) == (
        "the activation pre-scales of the parts are equal",
        "the input scales of the parts are equal",
    )
    assert assumptions(parts[:1]) == ()
    assert assumptions(_parts(NVFP4, OTHER, executed=("fp4", "fp4"))) == ()
