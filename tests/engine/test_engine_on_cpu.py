"""Some seconds of random traffic over the bundled model on a CPU."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import vtensors
from late_runner import new_sequence
from vtensors_engine.bundled import bundled_checkpoint
from vtensors_engine.engine import Engine
from vtensors_engine.llm import LLM
from vtensors_engine.runner import ReferenceRunner
from vtensors_engine.sampling import SamplingParams
from vtensors_engine.sequence import Sequence

_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "top_p": 0.9, "seed": 6},
)
LONGEST = 8


@pytest.fixture(scope="module")
def model() -> Any:
    return vtensors.load_model(bundled_checkpoint(), device="cpu")


def tokens_of(sequence: Sequence) -> list[int]:
    return [token.token_id for token in sequence.sampled]


def test_random_traffic_over_a_real_model_gives_every_request_its_solo_answer(model: Any) -> None:
    dice = random.Random(1)
    pool = [tuple(dice.randrange(5, model.vocab_size) for _ in range(n)) for n in (1, 2, 17)]
    llm = LLM(model, max_sequences=3)

    def params(number: int, limit: int) -> SamplingParams:
        return SamplingParams(max_tokens=limit, ignore_eos=True, **_SETTINGS[number])

    solo = {
        (prompt, number): llm.generate(list(prompt), params(number, LONGEST))[0]
        for prompt in pool
        for number in range(len(_SETTINGS))
    }
    runner = ReferenceRunner(model, max_sequences=5)
    engine = Engine(runner)
    running: dict[Sequence, tuple[tuple[int, ...], int]] = {}
    counts: Counter[str] = Counter()
    for _ in range(70):
        if dice.random() < 0.45:
            key = (dice.choice(pool), dice.randrange(len(_SETTINGS)))
            sequence = new_sequence(key[0], params(key[1], dice.randint(1, LONGEST)))
            running[sequence] = key
            engine.add(sequence)
        if running and dice.random() < 0.08:
            engine.cancel(dice.choice(list(running)))
        engine.step()
    while engine.busy:
        engine.step()
    for sequence, key in running.items():
        counts[sequence.finish_reason or "none"] += 1
        made = tokens_of(sequence)
        assert made == solo[key].token_ids[: len(made)]
        assert sequence.finish_reason == "abort" or len(made) == sequence.limit
        if sequence.params.logprobs is not None:
            assert sequence.completion().logprobs == (solo[key].logprobs or ())[: len(made)]
    assert set(counts) == {"length", "abort"}
    assert counts["length"] > 15
    assert runner._sequences == {}


def test_the_switch_for_bad_values_reaches_the_model(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=4, seed=1)
    expected = LLM(model).generate("In the beginning", greedy)
    assert not model._model.debug_nan
    monkeypatch.setenv("VT_DEBUG_NAN", "1")
    watching = vtensors.load_model(bundled_checkpoint(), device="cpu")
    assert watching._model.debug_nan
    assert LLM(watching).generate("In the beginning", greedy) == expected
