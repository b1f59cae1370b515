"""The FP8 activation quantizer, emulated: codes and scales bit for bit the reference's, at every 16-bit number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_formats import (
    FP4Activation,
    FP8GroupActivation,
    FP8StaticActivation,
    FP8TokenActivation,
    MXFP8Activation,
    e4m3,
    e8m0,
)
from vtensors_formats.activations import ActivationQuantizer, QuantizedActivation
from vtensors_kernels.activation_quantizers.fp8 import FP8Quantizer, Scaling, Written, scaling_of
from vtensors_kernels.arguments import scaled_x

HALVES = [torch.bfloat16, torch.float16]
ARCHS = [800, 900]
RULES = {e8m0.ExponentRule.CEIL: 0, e8m0.ExponentRule.FLOOR: 1, e8m0.ExponentRule.FLOOR_ROUNDED: 2}
GROUPS = {Scaling.TOKEN: None, Scaling.GROUP: 128, Scaling.MX: 32}


def every_number(dtype: torch.dtype, k: int) -> Tensor:
    """[65536 / k, k]: every bit pattern of the dtype once, in an order that puts sizes beside each other."""
    bits = torch.arange(65536, dtype=torch.int32) * 40503 % 65536
    return bits.to(torch.uint16).view(torch.int16).view(dtype).reshape(-1, k)


def rows_of_sizes(dtype: torch.dtype, k: int) -> Tensor:
    """[M, k]: rows of ordinary numbers in sizes from subnormal to the largest, rows of zeros, one of NaN, infinity."""
    source = torch.Generator().manual_seed(k)
    low, high = (-133, 128) if dtype == torch.bfloat16 else (-24, 16)
    sizes = torch.linspace(low, high - 2, 40).exp2().unsqueeze(1)
    rows = torch.randn(40, k, generator=source).clamp(-3, 3) / 3 * sizes
    rows[5] = 0.0
    rows[6] = -0.0
    rows[7, 1:] = 0.0
    rows = rows.to(dtype)
    rows[8, k // 2], rows[9, 3], rows[10, 0] = math.nan, math.inf, -math.inf
    rows[11, :], rows[11, k - 1] = 448.0, 1.75
    rows[12, :] = torch.finfo(dtype).max
    rows[13, :] = torch.finfo(dtype).smallest_normal
    return rows


def emulated(
    x: Tensor,
    activation: ActivationQuantizer,
    written: Written,
    *,
    arch: int = 900,
    pre_scale: Tensor | None = None,
    seed: int = 0,
) -> QuantizedActivation:
    """What the kernel writes for x [M, K], launched as `FP8Quantizer` does."""
    scaling, (m, k) = scaling_of(activation), x.shape
    codes = written is Written.CODES
    out = (
        torch.full((m, k), 0xAA, dtype=torch.uint8) if codes else torch.full((m, k), math.nan, dtype=x.dtype)
    )
    group = GROUPS.get(scaling) or k
    groups = -(-k // group)
    empty = (
        torch.full((m, groups), 0x55, dtype=torch.uint8)
        if scaling is Scaling.MX
        else torch.full((m, groups), -1.0)
    )
    stored = activation.scale.float().reshape(1) if isinstance(activation, FP8StaticActivation) else None
    threads = 512 if scaling is Scaling.TOKEN else 128
    columns = k if scaling in (Scaling.STORED, Scaling.TOKEN) else groups * group
    blocks = 1 if scaling is Scaling.TOKEN else -(-columns // 8 // threads)
    emulate(
        "common/quantize_fp8.cu",
        "quantize_fp8",
        {"VT_F16": int(x.dtype == torch.float16), "VT_SCALE": scaling.value, "VT_OUT": written.value},
        (m * blocks,),
        (threads,),
        [
            x,
            out,
            None if scaling is Scaling.STORED else empty,
            stored,
            pre_scale,
            x.stride(0),
            groups,
            1,
            k,
            blocks,
            RULES[activation.rule] if isinstance(activation, MXFP8Activation) else 0,
        ],
        arch=arch,
        seed=seed,
    )
    return QuantizedActivation(codes=out, scale=empty if stored is None else stored)


def same_codes(ours: Tensor, wanted: Tensor) -> bool:
    """Bit for bit; NaN has two codes, which mean the same."""
    nan = (wanted.view(torch.uint8) & 0x7F) == 0x7F
    return torch.equal((ours & 0x7F) == 0x7F, nan) and torch.equal(ours[~nan], wanted.view(torch.uint8)[~nan])


def same_numbers(ours: Tensor, wanted: Tensor) -> bool:
    return torch.equal(ours.isnan(), wanted.isnan()) and torch.equal(
        ours.nan_to_num(0.0).view(torch.int16 if ours.element_size() == 2 else torch.int32),
        wanted.nan_to_num(0.0).view(torch.int16 if ours.element_size() == 2 else torch.int32),
    )


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [1.0, 0.01, 3.0, 2.0**-20, 1e30])
def test_every_number_under_a_stored_scale(scale: float, dtype: torch.dtype, arch: int) -> None:
    activation, x = FP8StaticActivation(scale=torch.tensor(scale)), every_number(dtype, 1024)
    wanted = activation.codes(x)
    assert same_codes(emulated(x, activation, Written.CODES, arch=arch).codes, wanted.codes)
    values = emulated(x, activation, Written.VALUES, arch=arch).codes
    assert same_numbers(values, e4m3.decode(wanted.codes).to(dtype))


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [16, 336, 5120])
@pytest.mark.parametrize(
    "activation",
    [
        FP8TokenActivation(),
        FP8GroupActivation(),
        *(MXFP8Activation(rule=rule) for rule in RULES),
    ],
    ids=["token", "group", *(f"mx-{rule.value}" for rule in RULES)],
)
def test_scales_that_follow_from_x(
    activation: ActivationQuantizer, k: int, dtype: torch.dtype, arch: int
) -> None:
    x = rows_of_sizes(dtype, k)
    wanted = activation.codes(x)
    ours = emulated(x, activation, Written.CODES, arch=arch, seed=k % 3)
    assert same_codes(ours.codes, wanted.codes)
    if ours.scale.dtype == torch.uint8:
        assert torch.equal(ours.scale, wanted.scale)
    else:
        assert same_numbers(ours.scale, wanted.scale)
    rounded = emulated(x, activation, Written.ROUNDED, arch=arch)
    assert same_numbers(rounded.codes, activation(x))


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [32, 128])
def test_the_scale_of_every_largest_magnitude(group: int, dtype: torch.dtype) -> None:
    numbers = torch.arange(32768, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.zeros(32768, group, dtype=dtype)
    x[:, 0], x[:, 9] = -numbers, numbers / 3
    x = x.reshape(-1, 16 * group)
    rules = [MXFP8Activation(rule=rule) for rule in RULES] if group == 32 else [FP8GroupActivation()]
    for activation in rules:
        wanted, ours = activation.codes(x), emulated(x, activation, Written.CODES)
        assert same_codes(ours.codes, wanted.codes)
        same = torch.equal if group == 32 else same_numbers
        assert same(ours.scale, wanted.scale)


@needs_compiler
@pytest.mark.parametrize("activation", [FP8StaticActivation(scale=torch.tensor(0.03)), FP8TokenActivation()])
def test_a_pre_scale_comes_first_and_rounds(activation: ActivationQuantizer) -> None:
    x = torch.randn(3, 336, generator=torch.Generator().manual_seed(1)).bfloat16()
    pre_scale = torch.linspace(0.3, 1.7, 336)
    wanted = activation.codes(scaled_x(x, pre_scale))
    ours = emulated(x, activation, Written.CODES, pre_scale=pre_scale)
    assert same_codes(ours.codes, wanted.codes)
    assert not same_codes(ours.codes, activation.codes(x).codes)


@needs_compiler
@pytest.mark.parametrize("activation", [FP8TokenActivation(), FP8GroupActivation()])
def test_a_row_of_a_wider_matrix_is_quantized_alone(activation: ActivationQuantizer) -> None:
    wide = torch.randn(4, 640, generator=torch.Generator().manual_seed(2)).bfloat16()
    x = wide[:, 128:464]
    whole = emulated(x, activation, Written.CODES)
    assert same_codes(whole.codes, activation.codes(x).codes)
    for row in range(4):
        alone = emulated(x[row : row + 1], activation, Written.CODES)
        assert torch.equal(alone.codes[0], whole.codes[row])
        assert torch.equal(alone.scale[0], whole.scale[row])


def test_a_long_token_is_longer_than_what_threads_keep() -> None:
    from vtensors_kernels.activation_quantizers import fp8

    assert 5 * fp8._TOKEN_THREADS * fp8._COLUMNS == 20480


@needs_compiler
def test_a_token_of_more_columns_than_threads_keep() -> None:
    x = torch.randn(1, 20480 + 4112, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0, -1] = 30.0
    ours, wanted = emulated(x, FP8TokenActivation(), Written.CODES), FP8TokenActivation().codes(x)
    assert same_codes(ours.codes, wanted.codes)
    assert torch.equal(ours.scale, wanted.scale)


def test_other_quantizers_and_devices_are_refused() -> None:
    with pytest.raises(RequestError, match="no such activation quantizer"):
        scaling_of(FP4Activation(global_scale=torch.tensor(1.0)))
    with pytest.raises(RequestError, match="no such activation quantizer"):
        scaling_of(FP8GroupActivation(group=64))
    with pytest.raises(RequestError, match="on a CUDA device"):
        FP8Quantizer(FP8TokenActivation(), 64, torch.bfloat16, torch.device("cpu"))
