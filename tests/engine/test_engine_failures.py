"""The step loop where something fails: a request, a row, the memory, the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from late_runner import BAD_PROMPT, BAD_ROW, LateRunner, drained, greedy, made, new_sequence, solo
from vtensors.errors import DeviceError, VtensorsError
from vtensors_engine.drawing import Draw
from vtensors_engine.engine import Engine
from vtensors_engine.sampling import SamplingParams


@pytest.mark.parametrize("bad", [[BAD_PROMPT, 1], [BAD_ROW] + [1] * 8, [BAD_ROW] + [1] * 5, [1] * 40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_fails_ends_alone_with_its_message(bad: list[int], temperature: float) -> None:
    runner = LateRunner()
    engine = Engine(runner)
    others = [greedy([1, 2], 9), greedy([4], 12)]
    failing = new_sequence(bad, SamplingParams(temperature=temperature, max_tokens=8, seed=1))
    for sequence in (others[0], failing, others[1]):
        engine.add(sequence)
    events = drained(engine)
    for sequence in others:
        assert (made(sequence), sequence.finish_reason) == solo(sequence)
    assert failing.finish_reason == "error"
    assert failing.completion().error == str(failing.failure)
    (last,) = [e.piece for e in events if e.sequence is failing and e.piece.finish_reason is not None]
    assert (last.finish_reason, last.token_ids) == ("error", ())
    assert runner.leaks == 0


def test_a_runner_that_never_has_room_fails_the_request_instead_of_waiting_for_ever() -> None:
    runner = LateRunner()
    runner.slots.allocate()
    while runner.slots.free_slots:
        runner.slots.allocate()
    engine = Engine(runner)
    sequence = greedy([1], 2)
    engine.add(sequence)
    drained(engine)
    assert "nothing runs" in str(sequence.failure)


def test_a_runner_may_take_things_back_only_when_the_steps_that_used_them_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = LateRunner(ahead=2)
    inner = runner.admit

    def admit(prompt: Any, limit: int) -> int | None:
        return None if runner.unread else inner(prompt, limit)

    monkeypatch.setattr(runner, "admit", admit)
    engine = Engine(runner)
    sequences = [greedy([1], 4), greedy([2], 4)]
    for sequence in sequences:
        engine.add(sequence)
    drained(engine)
    assert [sequence.finish_reason for sequence in sequences] == ["length", "length"]


@pytest.mark.parametrize("fail_after", range(9))
def test_a_device_that_fails_ends_everything_with_a_clear_error_and_frees_all(fail_after: int) -> None:
    runner = LateRunner(fail_after=fail_after, chunk=2)
    engine = Engine(runner)
    sequences = [greedy([1], 4), greedy([2] * 4, 9), greedy([3], 4), greedy([4], 4), greedy([5], 4)]
    for sequence in sequences:
        engine.add(sequence)
    with pytest.raises(DeviceError, match="CUDA error: the device is gone") as caught:
        drained(engine)
    assert type(caught.value.__cause__) is RuntimeError
    assert not engine.busy
    assert runner.leaks == 0
    for sequence in sequences:
        assert sequence.finish_reason is not None
        assert sequence.failure in (None, caught.value)
    assert any(sequence.failure is not None for sequence in sequences)


def test_a_failure_while_a_step_is_read_ends_the_sequences_that_wait_for_it_alone() -> None:
    runner = LateRunner(ahead=2)
    engine = Engine(runner)
    sequence = greedy([1], 3)
    engine.add(sequence)
    while len(runner.launches) < 3:
        engine.step()
    # Its last token is launched, so only the unread steps know of it.
    runner.unread.clear()
    with pytest.raises(DeviceError):
        engine.step()
    assert sequence.finish_reason == "error"
    assert not engine.busy


def test_memory_that_runs_out_in_a_prompt_is_that_requests_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = LateRunner()
    engine = Engine(runner)
    other, failing = greedy([1], 9), greedy([2, 3], 3)
    inner = runner.prefill

    def prefill(handle: int, draw: Draw | None = None) -> Any:
        if runner._sequences[handle].prompt == (2, 3):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return inner(handle, draw)

    monkeypatch.setattr(runner, "prefill", prefill)
    engine.add(other)
    engine.add(failing)
    drained(engine)
    assert made(other) == solo(other)[0]
    assert isinstance(failing.failure, VtensorsError)
    assert "2 GiB" in str(failing.failure)
    assert runner.leaks == 0


_OF_A_STEP = {
    "_step",
    "_admit",
    "_prefill",
    "_decode",
    "_launched",
    "_read",
    "_forget",
    "_row",
    "_draw",
    "_fail",
}


def _interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Calls it, with a KeyboardInterrupt in front of the so-manieth line of a step; whether it came so far."""
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code.co_name not in _OF_A_STEP or not frame.f_code.co_filename.endswith("/engine.py"):
            return None
        seen += event == "line"
        if seen == line and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_in_front_of_any_line_of_a_step_leaves_nothing_behind() -> None:
    line = 0
    while True:
        line += 1
        runner = LateRunner(capacity=2, pages=12, chunk=2)
        engine = Engine(runner)
        sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=3)
        sequences = [greedy([1, 2, 3], 4), greedy([4], 1), new_sequence([5, 6], sampled), greedy([1] * 90, 3)]
        for sequence in sequences:
            engine.add(sequence)
        if not _interrupted_at(line, lambda engine=engine: drained(engine)):  # type: ignore[misc]
            break
        # In front of the first line of a step it has not begun.
        drained(engine)
        assert not engine.busy
        assert runner.leaks == 0, line
        assert all(sequence.finish_reason is not None for sequence in sequences), line
        runner.unread.clear()
        again = greedy([1, 2], 5)
        engine.add(again)
        drained(engine)
        assert (made(again), again.finish_reason) == solo(again), line
        assert runner.leaks == 0
    assert line > 200
