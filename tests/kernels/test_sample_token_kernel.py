"""The drawing kernel in the emulator: the token of the reference and of the engine's rule, at every setting.

Another token than theirs is right only where the point lies within `EPS` of a boundary: see `rounding_allows`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drawing_cases import SETTINGS, logits_like, rounding_allows, settings_of
from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_engine.drawing import Draw, drawn_token
from vtensors_kernels.compiling.sources import Source, load_source
from vtensors_kernels.reference.sample_token import kept_masses, sample_token
from vtensors_kernels.steps.sample_token import SHARED_BYTES, THREADS, SampleToken

HALVES = [torch.bfloat16, torch.float16]
_SCORES = """
extern "C" __global__ void scores(const float* values, const float* scale, float* scores, float* weights,
                                  long long* masses, int count) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  scores[i] = score_of(values[i], {scale[0], scale[1], __fdiv_rn(1.0f, scale[1])});
  weights[i] = weight_of(scores[i]);
  masses[i] = mass_of(weights[i]);
}
"""
POINTS = (0.0, 0.137, 0.5, 0.83, 1 - 2.0**-53)


def drawn(
    logits: Tensor,
    settings: Tensor,
    steps: Tensor | None = None,
    *,
    largest: Tensor | None = None,
    seed: int = 0,
) -> list[int]:
    """What the kernel makes of tokens that were -1."""
    rows = logits.shape[0]
    tokens = torch.full((rows,), -1)
    largest = logits.float().amax(-1) if largest is None else largest
    steps = torch.ones(rows, dtype=torch.int32) if steps is None else steps
    emulate(
        "common/sample_token.cu",
        "sample_token",
        {"VT_F16": int(logits.dtype == torch.float16)},
        (rows,),
        (THREADS,),
        [logits, settings, largest, steps, tokens, logits.stride(0), logits.shape[1]],
        shared_bytes=SHARED_BYTES,
        seed=seed,
    )
    return tokens.tolist()


def check(row: Tensor, names: list[str], points: tuple[float, ...] = POINTS) -> None:
    """Kernel, reference and the engine's rule draw the same token, or rounding decides."""
    settings = torch.stack([settings_of(name, point) for name in names for point in points])
    logits = row.expand(len(settings), -1).contiguous()
    wanted = torch.full((len(settings),), -1)
    sample_token(logits, settings, row.max().float().expand(len(settings)), torch.ones(len(settings)), wanted)
    for index, (token, reference) in enumerate(zip(drawn(logits, settings), wanted.tolist(), strict=True)):
        temperature, top_k, top_p, min_p, point = settings[index].tolist()
        rule = drawn_token(
            row, Draw(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p, point=point)
        )
        what = f"{settings[index].tolist()}: {token}, reference {reference}, rule {rule}"
        assert token == reference == rule or rounding_allows(row, settings[index], token), what
        assert reference == rule or rounding_allows(row, settings[index], reference), what
        assert rounding_allows(row, settings[index], rule), what
        assert kept_masses(row, settings[index])[token] > 0, what


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["model", "ties", "flat", "forbidden"])
@pytest.mark.parametrize("columns", [1, 2, 9, 2049])
def test_every_setting_draws_the_token_of_the_rule(columns: int, kind: str, dtype: torch.dtype) -> None:
    check(logits_like(kind, columns, dtype), list(SETTINGS))


@needs_compiler
@pytest.mark.parametrize("kind", ["model", "ties"])
def test_a_long_row_draws_the_token_of_the_rule(kind: str) -> None:
    check(logits_like(kind, 70_001, torch.bfloat16), list(SETTINGS), (0.31, 0.9))
    check(logits_like(kind, 248_320, torch.float16), ["all", "plain"], (0.77,))


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_every_token_is_drawn_in_the_midst_of_what_it_has(dtype: torch.dtype) -> None:
    for name in ("plain", "p", "k", "all", "flat p", "hottest"):
        row = logits_like("ties", 300, dtype)
        masses = kept_masses(row, settings_of(name, 0.0))
        whole, kept = int(masses.sum()), masses.nonzero()[:, 0].tolist()
        chosen = [token for token in kept if int(masses[token]) > whole >> 18]
        middles = [(int(masses[:token].sum()) + int(masses[token]) // 2) / whole for token in chosen]
        settings = torch.stack([settings_of(name, point) for point in middles])
        assert drawn(row.expand(len(chosen), -1).contiguous(), settings) == chosen, name


@needs_compiler
def test_equal_tokens_at_a_threshold_stay_in_the_order_of_their_ids() -> None:
    row = torch.zeros(40, dtype=torch.bfloat16)
    row[[7, 30]] = 1.0
    points = [i / 64 for i in range(64)]
    five = torch.tensor([[1.0, 5, 1.0, 0.0, point] for point in points], dtype=torch.float64)
    assert set(drawn(row.expand(64, -1).contiguous(), five)) == {0, 1, 2, 7, 30}
    flat = torch.zeros(64, 40, dtype=torch.bfloat16)
    half = torch.tensor([[1.0, 0, 0.5, 0.0, point] for point in points], dtype=torch.float64)
    assert set(drawn(flat, half)) == set(range(20))
    both = torch.tensor([[1.0, 10, 0.31, 0.0, point] for point in points], dtype=torch.float64)
    assert set(drawn(flat, both)) == {0, 1, 2, 3}
    # Scores that a probability in float32 cannot tell apart are equal.
    row = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.bfloat16)
    hot = torch.tensor([[1e30, 2, 1.0, 0.0, point] for point in points], dtype=torch.float64)
    assert set(drawn(row.expand(64, -1).contiguous(), hot)) == {0, 1}


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_a_cut_far_below_the_largest_logit_is_found_window_by_window(dtype: torch.dtype) -> None:
    # Every finite value: positive ones, those next to 0 and negative ones are windows of their own.
    bits = torch.arange(0, 1 << 16).to(torch.int16).view(dtype)
    row = bits[bits.isfinite() & (bits.abs() < 60000)][:: 3 if dtype == torch.float16 else 7].contiguous()
    settings = torch.tensor(
        [
            [3e4, top_k, top_p, 0.0, point]
            for top_k, top_p in ((5000, 1.0), (0, 0.6), (6000, 0.5), (7000, 0.999), (0, 0.99))
            for point in (0.25, 0.999)
        ],
        dtype=torch.float64,
    )
    logits = row.expand(len(settings), -1).contiguous()
    for own, token in zip(settings, drawn(logits, settings), strict=True):
        assert rounding_allows(row, own, token), own.tolist()


@needs_compiler
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.1, 50.0, 1e-30, 3.4e38])
@pytest.mark.parametrize("dtype", HALVES)
def test_scores_of_all_values_are_quotients_as_ieee_rounds_them_and_masses_whole_numbers(
    dtype: torch.dtype, temperature: float
) -> None:
    text = load_source("common/sample_token.cu").text + _SCORES
    values = torch.arange(1 << 16).to(torch.int16).view(dtype).float()
    for largest in (20.0, 0.375, -3.0):
        below = values[values <= largest].contiguous()
        count = len(below)
        scores, weights, masses = torch.empty(count), torch.empty(count), torch.empty(count).long()
        scale = torch.tensor([largest, temperature])
        emulate(
            Source(name="scores.cu", text=text),
            "scores",
            {"VT_F16": int(dtype == torch.float16)},
            (-(-count // 256),),
            (256,),
            [below, scale, scores, weights, masses, count],
        )
        assert torch.equal(scores, ((below - largest) / temperature).clamp(min=-200) + 1.0 - 1.0)
        assert torch.equal(masses, (weights.double() * 2.0**44).floor().long())


@needs_compiler
def test_neighbours_threads_and_places_change_nothing() -> None:
    row, names = logits_like("ties", 3001, torch.bfloat16), ["plain", "p", "k and p", "all"]
    settings = torch.stack([settings_of(name, 0.4) for name in names])
    together = drawn(row.expand(4, -1).contiguous(), settings)
    for index in range(4):
        alone = settings[index : index + 1].contiguous()
        assert drawn(row.unsqueeze(0), alone) == together[index : index + 1]
        assert drawn(row.unsqueeze(0), alone, seed=1) == together[index : index + 1]
    wide = torch.full((4, 3100), math.nan, dtype=torch.bfloat16)
    for first in range(9):
        part = wide[:, first : first + 3001]
        part.copy_(row.expand(4, -1))
        assert drawn(part, settings) == together


@needs_compiler
def test_a_row_that_is_greedy_or_padding_or_without_a_finite_logit_keeps_its_token() -> None:
    logits = logits_like("model", 500, torch.bfloat16).repeat(7, 1)
    settings = torch.stack([settings_of("p", 0.4)] * 7)
    settings[0, 0] = 0.0
    steps = torch.tensor([1, 0, 1, 1, 1, 1, 1], dtype=torch.int32)
    logits[2, 9] = math.nan
    logits[3] = -math.inf
    logits[4, 3] = math.inf
    logits[5] = math.nan
    tokens = drawn(logits, settings, steps)
    assert tokens[:6] == [-1] * 6
    assert tokens[6] >= 0


@needs_compiler
def test_zeros_of_both_signs_are_equal_also_as_the_largest() -> None:
    row = torch.tensor([-0.0, 0.0, -0.0, 0.0, -1.0], dtype=torch.bfloat16)
    settings = torch.tensor([[1.0, 3, 1.0, 0.0, point / 12] for point in range(12)], dtype=torch.float64)
    for zero in (0.0, -0.0):
        found = drawn(row.expand(12, -1).contiguous(), settings, largest=torch.full((12,), zero))
        assert found == [0] * 4 + [1] * 4 + [2] * 4


@needs_compiler
def test_temperatures_beyond_float32_are_the_least_and_the_largest_of_it() -> None:
    row = logits_like("forbidden", 300, torch.bfloat16)
    settings = torch.tensor(
        [[heat, 0, 1.0, 0.0, 0.6] for heat in (1e-300, 1e-40, 1e-30, 3e38, 1e39, 1e300)], dtype=torch.float64
    )
    logits, steps = row.expand(6, -1).contiguous(), torch.ones(6)
    wanted = torch.full((6,), -1)
    sample_token(logits, settings, row.max().float().expand(6), steps, wanted)
    found = drawn(logits, settings)
    assert found == wanted.tolist()
    assert found[:3] == [int(row.argmax())] * 3
    assert len(set(found[3:])) == 1
    assert row[found[3]].isfinite()


@needs_compiler
def test_a_point_that_was_rounded_up_to_1_draws_the_last_token_that_stays() -> None:
    row = torch.tensor([1.0, 2.0, 1.5, -50.0], dtype=torch.bfloat16)
    for top_k, last in ((0, 3), (3, 2), (1, 1)):
        settings = torch.tensor([[2.0, top_k, 1.0, 0.0, 1.0]], dtype=torch.float64)
        tokens = torch.zeros(1, dtype=torch.int64)
        sample_token(row.unsqueeze(0), settings, row.max().float().unsqueeze(0), torch.ones(1), tokens)
        assert drawn(row.unsqueeze(0), settings) == tokens.tolist() == [last]


def test_another_device_is_refused() -> None:
    with pytest.raises(RequestError, match="CUDA"):
        SampleToken("cpu", torch.bfloat16)
