"""The traffic of `soak.py` over a runner without a model: it meets all that it should, and sees what is wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

import late_runner
from engine.soak import Soak, Wrong, solo, waves
from late_runner import LateRunner, LateStep
from vtensors_engine.engine import Engine

LONGEST = 12
POOL = [tuple(random.Random(n).randrange(20) for _ in range(1 + n % 7)) for n in range(12)]


def soak_over(runner: LateRunner, seed: int = 1) -> Soak:
    """A hundredth of a second passes from one look at the clock to the next."""
    engine = Engine(runner)
    answers = [solo(engine, prompt, LONGEST) for prompt in POOL]
    ticks = itertools.count()
    return Soak(
        engine=engine,
        pool=POOL,
        answers=answers,
        waves=waves(runner.capacity),
        held=lambda: runner.leaks,
        dice=random.Random(seed),
        clock=lambda: next(ticks) / 100,
    )


@pytest.mark.parametrize("ahead", [0, 2])
def test_traffic_has_everything_in_it_and_a_sound_runner_bears_it(ahead: int) -> None:
    runner = LateRunner(ahead=ahead, capacity=4, pages=16)
    soak = soak_over(runner)
    soak.run(60)
    assert set(soak.counts) >= {f"ended: {end}" for end in ("stop", "length", "abort", "error")}
    assert {name for name in soak.counts if name.startswith("waves")} == {
        f"waves: {wave.name}" for wave in soak.waves
    }
    assert soak.counts["compared"] > 300
    assert soak.counts["times idle"] > 10
    assert soak.most_running == 4
    assert runner.most_unread == ahead + 1
    assert runner.leaks == 0


def wrong_logits(tokens: list[int]) -> torch.Tensor:
    """Those of another sequence behind the eleventh token, rarely."""
    row = late_runner_logits(tokens)
    return row.flip(0) if len(tokens) > 11 and sum(tokens) % 7 == 0 else row


late_runner_logits = late_runner.logits_of


class Leaking(LateRunner):
    """Forgets to free the slot of one sequence."""

    def release(self, handle: int) -> None:
        own = self._sequences.pop(handle)
        self.pages.free(own.pages)
        if handle != 2 * len(POOL):
            self.slots.free(own.slot)


class Shifting(LateRunner):
    """Gives a row the token of its neighbour, in batches of three."""

    def _step(self, running: object, draws: object) -> LateStep:
        step = super()._step(running, draws)  # type: ignore[arg-type]
        if len(step.rows) == 3:
            step.rows.reverse()
            step.chosen.reverse()
        return step


@pytest.mark.parametrize(
    ("build", "told"),
    [(Leaking, "pages and slots are in use"), (Shifting, "alone")],
    ids=["leaking", "shifting"],
)
def test_what_is_wrong_is_seen(build: Callable[..., LateRunner], told: str) -> None:
    soak = soak_over(build(capacity=4, pages=16))
    with pytest.raises(Wrong, match=told):
        soak.run(60)


def test_another_answer_than_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = soak_over(LateRunner(capacity=4, pages=16))
    monkeypatch.setattr(late_runner, "logits_of", wrong_logits)
    with pytest.raises(Wrong, match=r"token \d+ is \d+, alone \d+"):
        soak.run(60)


def test_a_request_that_fails_is_seen() -> None:
    soak = soak_over(LateRunner(capacity=4, pages=16))
    soak.pool = [(late_runner.BAD_PROMPT, *prompt) for prompt in POOL]
    with pytest.raises(Wrong, match="the prompt is bad"):
        soak.run(60)
