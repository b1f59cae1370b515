"""The step loop over a runner that answers late: any arrivals, lengths, stops, cancellations and settings."""

from __future__ import annotations

import random
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from late_runner import VOCABULARY, LateRunner, drained, greedy, logits_of, made, new_sequence, solo
from vtensors.errors import RequestError
from vtensors_engine.engine import Engine, Event
from vtensors_engine.outputs import Timing
from vtensors_engine.sampling import SamplingParams
from vtensors_engine.sequence import Sequence

_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "seed": 4},
)


@st.composite
def requests(draw: st.DrawFn) -> Sequence:
    prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
    params = SamplingParams(max_tokens=draw(st.integers(1, 14)), **draw(st.sampled_from(_SETTINGS)))
    return new_sequence(prompt, params, draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2)))


@settings(max_examples=150)
@given(
    st.lists(
        st.one_of(
            requests(),
            st.just("step"),
            st.just("step"),
            st.just("step"),
            st.tuples(st.just("cancel"), st.integers(0, 30)),
        ),
        max_size=40,
    ),
    st.integers(0, 3),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_request_gets_what_it_gets_alone_and_nothing_is_left(
    actions: list[Any], ahead: int, capacity: int, draws: bool
) -> None:
    runner = LateRunner(ahead=ahead, capacity=capacity, draws=draws)
    engine = Engine(runner)
    sequences: list[Sequence] = []
    events: list[Event] = []
    for action in actions:
        if isinstance(action, Sequence):
            sequences.append(action)
            engine.add(action)
        elif action == "step":
            events += engine.step()
        elif action[1] < len(sequences):
            engine.cancel(sequences[action[1]])
    events += drained(engine)
    assert runner.leaks == 0
    assert runner.unread == []
    assert runner.most_unread <= ahead + 1
    for sequence in sequences:
        told = [event.piece for event in events if event.sequence is sequence]
        assert [token for piece in told for token in piece.token_ids] == made(sequence)
        tokens, reason = solo(sequence)
        if sequence.finish_reason == "abort":
            assert made(sequence) == tokens[: len(sequence.sampled)]
            continue
        if len(sequence.prompt_token_ids) + sequence.limit > 32:
            # More than all pages hold.
            assert isinstance(sequence.failure, RequestError)
            tokens, reason = [], "error"
        assert (made(sequence), sequence.finish_reason) == (tokens, reason)
        assert [piece.finish_reason for piece in told[:-1]] == [None] * (len(told) - 1)
        assert told[-1].finish_reason == reason
        assert (sequence.failure is None) == (reason != "error")


def test_a_soak_of_random_traffic_ends_with_every_answer_right_and_nothing_missing() -> None:
    dice = random.Random(5)
    runner = LateRunner(capacity=8, pages=40, page_size=4, chunk=5)
    engine = Engine(runner)
    running: list[Sequence] = []
    ended: list[Sequence] = []
    for _ in range(6000):
        if len(running) < 14 and dice.random() < 0.2:
            params = SamplingParams(max_tokens=dice.randint(1, 30), **dice.choice(_SETTINGS))
            prompt = [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 25))]
            running.append(new_sequence(prompt, params, [dice.randrange(VOCABULARY)]))
            engine.add(running[-1])
        if running and dice.random() < 0.01:
            engine.cancel(dice.choice(running))
        engine.step()
        ended += [sequence for sequence in running if sequence.finish_reason is not None]
        running = [sequence for sequence in running if sequence.finish_reason is None]
    drained(engine)
    assert runner.leaks == 0
    reasons = {sequence.finish_reason for sequence in ended}
    assert reasons == {"stop", "length", "abort", "error"}
    assert len(ended) > 500
    for sequence in ended:
        tokens, reason = solo(sequence)
        if sequence.finish_reason == "abort":
            assert made(sequence) == tokens[: len(sequence.sampled)]
        else:
            assert (made(sequence), sequence.finish_reason) == (tokens, reason)


def test_requests_are_admitted_in_their_order_and_none_overtakes_one_that_does_not_fit() -> None:
    runner = LateRunner(capacity=4, pages=9, page_size=4)
    engine = Engine(runner)
    # Eight pages: the second request takes six and has to wait for the first, the third would fit at once.
    prompts = [[1, 2, 3, 4, 5, 6], [2] * 12, [3]]
    for prompt, count in zip(prompts, (8, 12, 2), strict=True):
        engine.add(greedy(prompt, count))
    drained(engine)
    assert runner.admitted == [tuple(prompt) for prompt in prompts]
    assert runner.launches.index("decode 1") < runner.launches.index("prefill", 2)


def test_a_long_prompt_is_processed_chunk_by_chunk_between_the_steps_of_others() -> None:
    runner = LateRunner(chunk=2)
    engine = Engine(runner)
    engine.add(greedy([1], 8))
    engine.add(greedy([2] * 7, 3))
    drained(engine)
    between = runner.launches[1:9]
    assert between == ["decode 1", "prefill"] * 4


def test_greedy_steps_are_launched_ahead_and_their_surplus_is_dropped() -> None:
    runner = LateRunner(ahead=2)
    engine = Engine(runner)
    stop = solo(greedy([1, 2], 3))[0][1]
    sequence = greedy([1, 2], 12, (stop,))
    engine.add(sequence)
    events = drained(engine)
    assert runner.most_unread == 3
    expected = solo(sequence)
    assert (made(sequence), sequence.finish_reason) == expected
    assert len(events) == len(expected[0])
    surplus = len(runner.launches) - len(expected[0])
    assert 0 < surplus <= 2


def test_a_sequence_that_is_chosen_on_the_host_keeps_all_steps_in_hand() -> None:
    reported = {"temperature": 1.0, "seed": 1, "logprobs": 0}
    for changes, draws in (
        ({"temperature": 1.0, "seed": 1}, False),
        ({"logprobs": 0}, True),
        (reported, True),
    ):
        runner = LateRunner(ahead=2, draws=draws)
        engine = Engine(runner)
        params = attrs.evolve(SamplingParams(temperature=0.0, max_tokens=6), **changes)
        engine.add(new_sequence([1, 2], params))
        engine.add(greedy([3], 5))
        while engine.busy:
            engine.step()
            assert runner.unread == []
        assert set(runner.launches) == {"prefill", "decode 1", "decode 2"}


def test_tokens_that_the_runner_draws_are_launched_ahead_as_greedy_ones_are() -> None:
    params = SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, seed=7, max_tokens=12)
    stop = solo(new_sequence([1, 2], params))[0][4]
    sampled, other = new_sequence([1, 2], params, (stop,)), greedy([3], 9)
    runner = LateRunner(ahead=2)
    engine = Engine(runner)
    for sequence in (sampled, other):
        engine.add(sequence)
    drained(engine)
    assert runner.most_unread == 3
    for sequence in (sampled, other):
        assert (made(sequence), sequence.finish_reason) == solo(sequence)


def test_a_prompt_in_chunks_takes_one_number_for_its_first_token() -> None:
    for chunk in (1, 2, 7):
        sequence = new_sequence([1, 2, 3, 4, 5, 6, 7], SamplingParams(temperature=2.0, seed=3, max_tokens=6))
        engine = Engine(LateRunner(chunk=chunk))
        engine.add(sequence)
        drained(engine)
        assert made(sequence) == solo(sequence)[0]


def test_what_a_sequence_holds_is_free_when_its_last_token_is_launched() -> None:
    runner = LateRunner(ahead=2)
    engine = Engine(runner)
    engine.add(greedy([1], 3))
    while len(runner.launches) < 3:
        engine.step()
    assert runner.leaks == 0
    assert runner.unread
    assert engine.busy


def test_cancelling_frees_at_once_whatever_the_sequence_is_doing() -> None:
    runner = LateRunner(chunk=2, capacity=2)
    engine = Engine(runner)
    running, prefilling, waiting = greedy([1], 9), greedy([2] * 6, 3), greedy([3], 3)
    for sequence in (running, prefilling, waiting):
        engine.add(sequence)
    for _ in range(3):
        engine.step()
    for sequence in (waiting, prefilling, running):
        engine.cancel(sequence)
        assert sequence.finish_reason == "abort"
    assert runner.leaks == 0
    assert runner.unread
    engine.cancel(running)
    assert drained(engine) == []
    assert runner.unread == []


def test_timing_counts_prompt_tokens_and_the_tokens_of_steps() -> None:
    timing = Timing()
    engine = Engine(LateRunner())
    engine.add(greedy([1, 2, 3, 4], 5))
    engine.add(greedy([5], 1))
    while engine.busy:
        engine.step(timing)
    assert (timing.prefill_tokens, timing.decode_tokens) == (5, 4)
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0


def test_the_rows_of_the_late_runner_have_ties() -> None:
    rows = [logits_of([n]) for n in range(200)]
    assert sum(int((row == row.max()).sum() > 1) for row in rows) > 10
