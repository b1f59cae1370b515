"""Forms of `linear_nvfp4_stream`: they fit, they agree with the source's layout, and every shape has one."""

from __future__ import annotations

import re
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtensors.errors import RequestError
from vtensors_kernels.compiling.architectures import COMPILED, PORTABLE, SHARED_KIB
from vtensors_kernels.compiling.sources import load_source
from vtensors_kernels.fp8.packed import Scales
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.nvfp4.stream_form import (
    MAX_TOKENS,
    StreamForm,
    choose_form,
    defines_of,
    rules_of,
    serves,
    shared_limit,
)

SHAPES = [
    *((34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (248320, 5120)),
    *((12288, 2048), (2048, 4096), (1024, 2048), (2048, 512), (1, 16), (40, 144), (8192, 28672)),
]
TARGETS = [*COMPILED, PORTABLE]
MULTIPROCESSORS = {"sm_90a": 132, "sm_80": 108, "sm_121a": 48}


def _sms(target: str) -> int:
    return MULTIPROCESSORS.get(target, 84)


def _layout_end(form: StreamForm, k: int, m: int) -> int:
    """The last byte of dynamic shared memory, as `Layout` of stream_layout.cuh computes it with VT_PROLOGUE 2."""
    steps, own = (k + 127) // 128, 8 // form.cluster
    x_row = (steps * own + 7) // 8 * 256 + 32
    message = (m + 1) // 2 * 128
    x = form.warps * form.stages * form.row_tiles * form.stage_blocks * 1152
    sums = x + m * x_row
    received = sums + form.slots * own * message
    token_scale = received + (0 if form.cluster == 1 else form.reducers * 2 * form.cluster * message)
    full = token_scale + 8 * form.token_tiles * 4
    x_full = full + 8 * form.warps * form.stages
    sum_empty = x_full + 8 + 8 * form.slots
    arrived = sum_empty + 8 * form.slots
    return arrived + 16 * form.reducers


def _check(form: StreamForm, n: int, k: int, m: int, target: str) -> None:
    own = 8 // form.cluster
    stride = form.warps // own
    assert m <= 8 * form.token_tiles
    assert form.shared_bytes == _layout_end(form, k, m)
    assert form.shared_bytes <= shared_limit(target, form.blocks_per_sm)
    assert stride * own == form.warps
    assert form.slots % lcm(stride * form.row_tiles, form.cluster * form.reducers) == 0
    assert form.threads <= 1024
    assert 2 <= form.stages <= 8
    assert 1 <= form.stage_blocks <= max(1, -(-k // 128 // 8) + 1)
    assert form.grid % form.cluster == 0
    assert 1 <= form.grid // form.cluster <= -(-n // 16)
    assert form.cluster == 1 or target == "sm_90a"
    assert defines_of(form) in [defines_of(rule) for rule in rules_of(target)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_shape_has_a_form_that_fits_for_every_number_of_tokens_served(
    n: int, k: int, target: str
) -> None:
    for m in range(1, serves(k, target) + 1):
        _check(choose_form(n, k, m, _sms(target), target), n, k, m, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "block_bytes", sorted({FORMAT.block_bytes, *(one.format.block_bytes for one in Scales)})
)
def test_the_longest_rows_have_a_form_for_every_number_of_tokens_served(
    block_bytes: int, target: str
) -> None:
    for k in (39_424, 45_056, 53_248, 65_536, 80_896, 87_040):
        most = serves(k, target, block_bytes)
        assert most or target != "sm_90a" or k > 80_896
        for m in range(1, most + 1):
            assert choose_form(16384, k, m, _sms(target), target, block_bytes).token_tiles * 8 >= m


@given(
    n=st.integers(1, 300_000),
    k=st.integers(1, 2048).map(lambda groups: 16 * groups),
    m=st.integers(1, MAX_TOKENS),
    multiprocessors=st.integers(1, 200),
    target=st.sampled_from(TARGETS),
)
def test_any_shape_has_a_form_or_is_refused_with_what_would_be_served(
    n: int, k: int, m: int, multiprocessors: int, target: str
) -> None:
    most = serves(k, target)
    if m <= most:
        _check(choose_form(n, k, m, multiprocessors, target), n, k, m, target)
    else:
        with pytest.raises(RequestError, match=rf"accepted: 1\.\.{most} tokens"):
            choose_form(n, k, m, multiprocessors, target)


@pytest.mark.parametrize(("n", "k"), SHAPES[:-1])
def test_a_hopper_serves_32_tokens_of_the_measured_shapes_in_one_launch(n: int, k: int) -> None:
    assert serves(k, "sm_90a") == MAX_TOKENS
    assert choose_form(n, k, 32, 132, "sm_90a").token_tiles == 4


@pytest.mark.parametrize("target", TARGETS)
def test_one_token_of_any_usual_row_fits_everywhere(target: str) -> None:
    assert serves(5120, target) >= 4
    assert serves(17408, target) >= 1


def test_small_matrices_get_no_more_clusters_than_row_tiles() -> None:
    assert choose_form(40, 5120, 1, 132, "sm_90a").grid == 3 * choose_form(40, 5120, 1, 132, "sm_90a").cluster
    form = choose_form(248320, 5120, 1, 132, "sm_90a")
    assert form.fitted(40, 132).grid == 3 * form.cluster
    assert form.fitted(248320, 30).grid == 30 * form.cluster


@pytest.mark.parametrize("m", [0, 33])
def test_no_or_too_many_tokens_are_refused(m: int) -> None:
    with pytest.raises(RequestError, match=r"accepted: 1\.\.32 tokens"):
        choose_form(5120, 5120, m, 132, "sm_90a")


def test_the_limits_are_those_of_the_devices() -> None:
    assert shared_limit("sm_90a", 1) == 232448
    assert shared_limit("sm_90a", 2) == 115712
    assert shared_limit("sm_89", 1) == 99 << 10
    assert shared_limit(PORTABLE, 1) == min(SHARED_KIB.values()) << 10
    for target in COMPILED:
        assert shared_limit(target, 1) == SHARED_KIB[target] << 10


def test_the_source_knows_every_macro_of_a_form() -> None:
    text = load_source("common/linear_nvfp4_stream.cu").text
    guarded = set(re.findall(r"#ifndef (VT_\w+)", text))
    assert set(choose_form(5120, 5120, 1, 132, "sm_90a").defines) <= guarded
