from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtensors.errors import RequestError, VtensorsError
from vtensors_engine.drawing import new_draw, probabilities
from vtensors_engine.sampling import (
    MAX_SEED,
    SampledToken,
    SamplingParams,
    new_generator,
    sample,
    sample_rows,
)

# softmax of these is 0.4, 0.3, 0.2, 0.1
LOGITS = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()


def draw(logits: torch.Tensor, params: SamplingParams, seed: int = 0) -> SampledToken:
    return sample(logits, params, new_generator(seed)[0])


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", 1.5, "integer"),
        ("max_tokens", True, "integer"),
        ("max_tokens", None, "integer"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, ">= 0"),
        ("temperature", math.inf, ">= 0"),
        ("temperature", "hot", ">= 0"),
        ("temperature", 10**400, ">= 0"),
        ("top_k", -1, ">= 0"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 2, "from 0 to 1"),
        ("seed", -1, str(MAX_SEED)),
        ("seed", MAX_SEED + 1, str(MAX_SEED)),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", [1], "strings"),
        ("stop", 3, "strings"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", ["a"], "token ids"),
        ("stop_token_ids", 3, "token ids"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", -1, ">= 0"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_name_value_and_what_is_accepted(
    name: str, value: Any, accepted: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value.seen).startswith(f"{name}=")
    assert str(value) in str(caught.value.seen) or isinstance(value, list)
    assert accepted in str(caught.value.accepted)


def test_numbers_and_stops_are_taken_in_the_forms_that_people_write() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=1, top_k=np.int32(2), stop="end", stop_token_ids=[np.int64(5)]
    )
    assert (params.max_tokens, params.temperature, params.stop) == (3, 1.0, ("end",))
    assert type(params.max_tokens) is int
    assert params.stop_token_ids == (5,)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equal_ones() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0])
    assert draw(logits, SamplingParams(temperature=0)).token_id == 1


def test_greedy_compares_in_the_dtype_that_the_model_gave() -> None:
    # 1.001 and 1.0 are one number in bfloat16: the lower id wins although its float32 value is smaller.
    logits = torch.tensor([0.0, 1.0, 1.001])
    assert draw(logits, SamplingParams(temperature=0)).token_id == 2
    assert draw(logits.to(torch.bfloat16), SamplingParams(temperature=0)).token_id == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_and_no_token(value: float, temperature: float) -> None:
    with pytest.raises(VtensorsError, match="not finite"):
        draw(torch.tensor([0.0, value, 1.0]), SamplingParams(temperature=temperature))


def test_tokens_forbidden_by_minus_infinity_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    generator, _ = new_generator(1)
    assert {sample(logits, SamplingParams(), generator).token_id for _ in range(50)} == {1, 3}


def test_the_largest_temperatures_draw_no_forbidden_token_either() -> None:
    logits = torch.tensor([-math.inf, 3.0, -math.inf, 0.0, -math.inf])
    for temperature in (1e30, 1e39, 1e308):
        probs = probabilities(logits, SamplingParams(temperature=temperature))
        assert probs.tolist() == [0, 0.5, 0, 0.5, 0]


def test_a_top_k_beyond_every_vocabulary_is_a_setting_that_a_device_can_hold() -> None:
    generator, _ = new_generator(1)
    assert float(new_draw(SamplingParams(top_k=10**400), generator).top_k) == 2**31 - 1
    assert draw(LOGITS, SamplingParams(top_k=10**400, seed=1)) == draw(LOGITS, SamplingParams(seed=1))


def test_temperature_divides_the_logits() -> None:
    expected = torch.softmax(LOGITS / 0.5, dim=0)
    assert torch.allclose(probabilities(LOGITS, SamplingParams(temperature=0.5)), expected)


def test_the_smallest_temperatures_are_greedy_and_finite() -> None:
    for temperature in (1e-300, 1e-40, 1e-6):
        probs = probabilities(LOGITS, SamplingParams(temperature=temperature))
        assert probs.tolist() == [0, 1, 0, 0]


def test_top_k_keeps_exactly_k_tokens_the_lowest_ids_of_equal_ones() -> None:
    probs = probabilities(torch.tensor([1.0, 1.0, 0.0, 1.0]), SamplingParams(top_k=2))
    assert torch.allclose(probs, torch.tensor([0.5, 0.5, 0.0, 0.0]))
    assert torch.allclose(probabilities(LOGITS, SamplingParams(top_k=99)), LOGITS.exp())


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_always_one() -> None:
    assert torch.allclose(
        probabilities(LOGITS, SamplingParams(top_p=0.65)), torch.tensor([0, 4 / 7, 0, 3 / 7])
    )
    assert probabilities(LOGITS, SamplingParams(top_p=1e-9)).tolist() == [0, 1, 0, 0]


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    probs = probabilities(LOGITS, SamplingParams(min_p=0.6))
    assert torch.allclose(probs, torch.tensor([0, 4 / 7, 0, 3 / 7]))


def test_top_p_looks_at_what_top_k_has_left() -> None:
    # After top_k=2 the best token alone has 4/7 > 0.55; of the whole distribution it has 0.4.
    assert probabilities(LOGITS, SamplingParams(top_k=2, top_p=0.55)).tolist() == [0, 1, 0, 0]
    assert (probabilities(LOGITS, SamplingParams(top_p=0.55)) > 0).tolist() == [False, True, False, True]


def test_top_p_looks_at_the_distribution_after_temperature() -> None:
    assert probabilities(LOGITS, SamplingParams(temperature=0.1, top_p=0.9)).tolist() == [0, 1, 0, 0]


def test_the_same_seed_draws_the_same_tokens_and_none_is_recorded() -> None:
    def tokens(seed: int | None) -> tuple[list[int], int]:
        generator, started = new_generator(seed)
        return [sample(torch.zeros(1000), SamplingParams(), generator).token_id for _ in range(20)], started

    assert tokens(7) == tokens(7)
    assert tokens(7)[0] != tokens(8)[0]
    drawn, seed = tokens(None)
    assert tokens(seed) == (drawn, seed)


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    generator, _ = new_generator(3)
    count = 4000
    seen = Counter(sample(LOGITS, SamplingParams(), generator).token_id for _ in range(count))
    for token, expected in enumerate(LOGITS.exp().tolist()):
        # Five standard deviations of a binomial.
        assert abs(seen[token] / count - expected) < 5 * math.sqrt(expected * (1 - expected) / count)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logprobs=2)
    token = draw(LOGITS, params)
    assert token.token_id == 1
    assert token.logprob == pytest.approx(math.log(0.4))
    assert [index for index, _ in token.top_logprobs] == [1, 3]
    assert token.top_logprobs[1][1] == pytest.approx(math.log(0.3))


def test_zero_logprobs_give_the_chosen_one_alone_and_none_gives_nothing() -> None:
    assert draw(LOGITS, SamplingParams(temperature=0, logprobs=0)).top_logprobs == ()
    assert draw(LOGITS, SamplingParams(temperature=0, logprobs=0)).logprob is not None
    assert draw(LOGITS, SamplingParams(temperature=0)) == SampledToken(token_id=1)


def test_more_logprobs_than_tokens_give_all_of_them() -> None:
    assert len(draw(LOGITS, SamplingParams(logprobs=10)).top_logprobs) == 4


@given(st.data())
def test_the_filters_leave_what_sorting_the_whole_vocabulary_leaves_bit_for_bit(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 30, 2000]))
    spread = data.draw(st.sampled_from([0.01, 1.0, 5.0, 40.0]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    # Rounded, so that there are ties.
    logits = ((torch.randn(size, generator=generator) * spread * 4).round() / 4).to(dtype)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.2, 1.0, 3.0])),
        top_k=data.draw(st.sampled_from([0, 1, 3, 40, 5000])),
        top_p=data.draw(st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0])),
        logprobs=data.draw(st.sampled_from([0, 1, 7, 3000])),
    )
    scores = logits.to(torch.float32)
    probs = torch.softmax((scores - scores.max()) / params.temperature, dim=0)
    ordered, order = torch.sort(probs, descending=True, stable=True)
    if params.top_k:
        ordered[params.top_k :] = 0
        ordered /= ordered.sum()
    before = torch.cumsum(ordered, dim=0) - ordered
    if params.top_p < 1:
        ordered[1:].masked_fill_(before[1:] >= params.top_p, 0)
    if params.top_k or params.top_p < 1:
        probs = torch.zeros_like(probs).scatter_(0, order, ordered)
    assert torch.equal(probabilities(logits, params), probs / probs.sum())
    logprobs = torch.log_softmax(scores, dim=0)
    ordered, order = torch.sort(logprobs, descending=True, stable=True)
    top = list(zip(order.tolist(), ordered.tolist(), strict=True))[: params.logprobs]
    assert list(draw(logits, params).top_logprobs) == top


@pytest.mark.gpu
def test_a_seed_means_the_same_tokens_for_logits_on_a_device() -> None:
    logits = torch.randn(5000) * 3
    for dtype in (torch.float32, torch.bfloat16):
        here = logits.to(dtype)
        for changes in (
            {},
            {"top_p": 0.9},
            {"top_k": 7},
            {"min_p": 0.1},
            {"temperature": 0.0, "logprobs": 3},
        ):
            params = SamplingParams(**{"logprobs": 2, **changes})
            for seed in range(20):
                assert draw(here.to("cuda"), params, seed) == draw(here, params, seed)


def test_rows_sampled_side_by_side_are_those_sampled_one_after_the_other() -> None:
    logits = torch.randn(6, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    logits[4, 7] = float("nan")
    settings = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.2, top_k=40),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.9, min_p=0.01),
    ]

    def generators() -> list[torch.Generator]:
        return [new_generator(seed)[0] for seed in range(6)]

    with ThreadPoolExecutor(3) as pool:
        rows = list(zip(range(6), settings, generators(), strict=True))
        found = sample_rows(logits, rows[::-1], pool)[::-1]
    for row, params, generator in zip(range(6), settings, generators(), strict=True):
        if row == 4:
            assert isinstance(found[4], VtensorsError)
        else:
            assert found[row] == sample(logits[row], params, generator)
