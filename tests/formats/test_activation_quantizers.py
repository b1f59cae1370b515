"""Activation quantizers: fixed vectors, the conventions' formulas, zeros, NaN, dtypes and codes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors.errors import ClaimError, RequestError
from vtensors_formats import e2m1, e4m3, e8m0
from vtensors_formats.activations import ActivationQuantizer, FP4Activation, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation

ALL: list[ActivationQuantizer] = [
    FP4Activation(global_scale=torch.tensor(0.001)),
    FP4Activation(global_divisor=torch.tensor(900.0)),
    FP8StaticActivation(scale=torch.tensor(0.01)),
    FP8TokenActivation(),
    FP8GroupActivation(),
    FP8GroupActivation(group=32),
    *[MXFP8Activation(rule=rule) for rule in e8m0.ExponentRule],
]


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values over several powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 4 - 3)


def case_name(quantizer: ActivationQuantizer) -> str:
    return f"{type(quantizer).__name__}-{ALL.index(quantizer)}"


@pytest.mark.parametrize("quantizer", ALL, ids=case_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64,), (3, 96), (2, 5, 160)])
def test_shape_and_dtype_are_kept_and_float32_is_computed_in(
    quantizer: ActivationQuantizer, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = spread(*shape).to(dtype)
    result = quantizer(x)
    assert (result.shape, result.dtype) == (x.shape, dtype)
    assert torch.equal(result, quantizer(x.to(torch.float32)).to(dtype))


@pytest.mark.parametrize("quantizer", ALL, ids=case_name)
def test_zeros_stay_zeros_without_nan(quantizer: ActivationQuantizer) -> None:
    x = spread(3, 160)
    x[1] = 0
    x[2, 32:96] = 0
    result = quantizer(x)
    assert bool(torch.isfinite(result).all())
    assert bool((result[1] == 0).all())
    assert bool((result[2, 32:96] == 0).all())


@pytest.mark.parametrize("quantizer", ALL, ids=case_name)
def test_a_nan_is_never_lost(quantizer: ActivationQuantizer) -> None:
    x = spread(2, 160)
    x[1, 40] = math.nan
    result = quantizer(x)
    assert math.isnan(result[1, 40])
    assert bool(torch.isfinite(result[0]).all())


@pytest.mark.parametrize("quantizer", ALL, ids=case_name)
def test_codes_and_scales_rebuild_the_result(quantizer: ActivationQuantizer) -> None:
    x = spread(4, 320)
    coded = quantizer.codes(x)
    if isinstance(quantizer, FP4Activation):
        assert coded.codes.shape == (4, 160)
        assert (coded.scale.shape, coded.scale.dtype) == ((4, 20), torch.float8_e4m3fn)
        block = e4m3.decode(coded.scale)
        by = quantizer.global_scale
        effective = block * by if by is not None else block / torch.tensor(900.0)
        rebuilt = e2m1.decode(coded.codes) * effective.repeat_interleave(16, dim=1)
    else:
        assert (coded.codes.shape, coded.codes.dtype) == ((4, 320), torch.float8_e4m3fn)
        scale = e8m0.decode(coded.scale) if coded.scale.dtype == torch.uint8 else coded.scale
        if scale.ndim:
            # Groups of 320 (a token), 128 (the last one partial) or 32.
            group = {1: 320, 3: 128, 10: 32}[scale.shape[1]]
            scale = scale.repeat_interleave(group, dim=1)[:, :320]
        rebuilt = e4m3.decode(coded.codes) * scale
    assert torch.equal(rebuilt, quantizer(x))


def test_fp4_with_a_multiplier_is_a_fixed_vector() -> None:
    # amax 6, g = 0.5: s = e4m3(6 / (6 * 0.5)) = 2, e = 2 * 0.5 = 1, so the grid is E2M1 itself.
    x = torch.tensor([6.0, 5.0, 4.9, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.26, -0.75, -5.1, 0, 1, 2, 3])
    quantizer = FP4Activation(global_scale=torch.tensor(0.5))
    assert quantizer(x).tolist() == [6, 4, 4, 4, 2, 2, 1, 1, 0, 0.5, -1, -6, 0, 1, 2, 3]
    coded = quantizer.codes(x)
    assert e4m3.decode(coded.scale).tolist() == [2.0]
    assert coded.codes[0].item() == 0x67
    assert torch.equal(FP4Activation(global_divisor=torch.tensor(2.0))(x), quantizer(x))


def test_fp4_follows_each_convention_s_order_of_operations() -> None:
    x, stored = spread(64, 256), torch.tensor(0.00041069428)
    groups = x.view(64, 16, 16)
    amax = groups.abs().amax(-1, keepdim=True)
    for quantizer, scale in (
        (FP4Activation(global_scale=stored), (amax / (6.0 * stored)).clamp(max=448)),
        (FP4Activation(global_divisor=1 / stored), ((1 / stored) * (amax / 6.0)).clamp(max=448)),
    ):
        rounded = scale.to(torch.float8_e4m3fn).to(torch.float32)
        effective = rounded * stored if quantizer.global_scale is not None else rounded / (1 / stored)
        scaled = torch.where(effective == 0, 0.0, groups / effective)
        expected = e2m1.decode_codes(e2m1.encode(scaled)) * effective
        assert torch.equal(quantizer(x), expected.view(64, 256))


def test_an_fp4_block_scale_above_448_saturates() -> None:
    x = torch.full((1, 16), 100.0)
    quantizer = FP4Activation(global_scale=torch.tensor(0.01))
    assert e4m3.decode(quantizer.codes(x).scale).tolist() == [[448.0]]
    assert quantizer(x)[0, 0] == torch.tensor(6.0) * (torch.tensor(448.0) * torch.tensor(0.01))


def test_an_fp4_group_too_small_for_its_scale_becomes_zero() -> None:
    x = torch.full((1, 16), 5.0)
    coded = FP4Activation(global_scale=torch.tensor(1000.0)).codes(x)
    assert e4m3.as_bytes(coded.scale).tolist() == [[0]]
    assert bool((coded.codes == 0).all())


def test_fp4_needs_whole_groups_and_one_scalar() -> None:
    with pytest.raises(RequestError, match="K = 40"):
        FP4Activation(global_scale=torch.tensor(1.0))(torch.ones(2, 40))
    with pytest.raises(ClaimError, match="one global scale"):
        FP4Activation()
    with pytest.raises(ClaimError, match=r"shape \[2\]"):
        FP4Activation(global_scale=torch.ones(2))


def test_static_fp8_divides_clamps_and_multiplies_by_the_stored_scale() -> None:
    x = torch.tensor([[1.0, 448.0, 500.0, -1e6, 0.51]])
    assert FP8StaticActivation(scale=torch.tensor(1.0))(x).tolist() == [[1.0, 448.0, 448.0, -448.0, 0.5]]
    stored = torch.tensor(0.0123, dtype=torch.bfloat16)
    values = spread(8, 64)
    wide = stored.to(torch.float32)
    expected = (values / wide).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * wide
    assert torch.equal(FP8StaticActivation(scale=stored)(values), expected)


def test_dynamic_fp8_per_token_uses_each_token_s_own_largest_value() -> None:
    x = spread(2, 7, 100)
    scale = x.abs().amax(-1, keepdim=True) / 448
    coded = FP8TokenActivation().codes(x)
    assert torch.equal(coded.scale, scale)
    assert torch.equal(e4m3.decode(coded.codes).abs().amax(-1), torch.full((2, 7), 448.0))


@given(k=st.integers(1, 300), group=st.integers(1, 130))
def test_a_partial_last_group_has_a_scale_of_its_own(k: int, group: int) -> None:
    x = spread(2, k, seed=k)
    quantizer = FP8GroupActivation(group=group)
    pieces = [FP8TokenActivation()(x[:, start : start + group]) for start in range(0, k, group)]
    assert torch.equal(quantizer(x), torch.cat(pieces, dim=1))
    assert quantizer.codes(x).scale.shape == (2, -(-k // group))


def test_mxfp8_scales_are_powers_of_two_and_nothing_saturates_with_ceil() -> None:
    x = spread(16, 64)
    coded = MXFP8Activation().codes(x)
    assert coded.scale.dtype == torch.uint8
    assert bool((x.abs().view(16, 2, 32).amax(-1) <= 448 * e8m0.decode(coded.scale)).all())
    # Half a step of E4M3: 1 / 16 of a normal value, 2^-10 of the scale below 2^-6 of it.
    slack = x.abs() / 16 + e8m0.decode(coded.scale).repeat_interleave(32, dim=1) * 2.0**-10
    assert bool(((MXFP8Activation()(x) - x).abs() <= slack).all())


@pytest.mark.parametrize("quantizer", ALL, ids=case_name)
def test_a_row_s_result_does_not_depend_on_its_batch(quantizer: ActivationQuantizer) -> None:
    x = spread(5, 160)
    assert torch.equal(quantizer(x)[3:4], quantizer(x[3:4]))


def test_kinds_and_moving() -> None:
    assert [quantizer.kind for quantizer in ALL[:5]] == ["fp4", "fp4", "fp8-static", *["fp8-dynamic"] * 2]
    moved = ALL[0].to("meta")
    assert isinstance(moved, FP4Activation)
    assert moved.global_scale is not None
    assert moved.global_scale.device.type == "meta"
    assert ALL[3].to("meta") is ALL[3]
