"""Calls that share the steps of one engine: from several threads, left early, collected in a step, failing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fake_model import FakeModel
from late_runner import LateRunner, drained, greedy, made, new_sequence, solo
from vtensors.errors import DeviceError
from vtensors_engine.engine import Engine
from vtensors_engine.llm import LLM
from vtensors_engine.outputs import StreamPiece
from vtensors_engine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def assert_nothing_is_left(llm: LLM) -> None:
    runner: Any = llm.engine.runner
    assert runner._sequences == {}
    assert llm._steps._untold == {}
    assert not llm.engine.busy


def test_threads_that_call_one_llm_take_turns_and_get_what_each_gets_alone() -> None:
    alone = [LLM(FakeModel()).generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    llm = LLM(FakeModel(), max_sequences=3)

    def call(number: int) -> None:
        index = number % len(PROMPTS)
        for _ in range(3):
            if number % 3 == 0:
                pieces = list(llm.stream(PROMPTS[index], GREEDY))
                assert [token for piece in pieces for token in piece.token_ids] == alone[index].token_ids
                assert pieces[-1].finish_reason == "length"
            elif number % 3 == 1:
                left = llm.stream(PROMPTS[index], GREEDY)
                assert next(left).token_ids == tuple(alone[index].token_ids[:1])
                left.close()  # type: ignore[attr-defined]
            else:
                answers = llm.generate([PROMPTS[index], PROMPTS[0]], GREEDY)
                assert [answer.token_ids for answer in answers] == [
                    alone[index].token_ids,
                    alone[0].token_ids,
                ]

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(call, number) for number in range(24)]:
            done.result(timeout=60)
    assert_nothing_is_left(llm)


def test_only_one_thread_at_a_time_is_in_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    inside, inner = threading.Lock(), model.step

    def step(token_ids: torch.Tensor, state: Any) -> torch.Tensor:
        assert inside.acquire(blocking=False), "two threads at a time"
        try:
            return inner(token_ids, state)
        finally:
            inside.release()

    monkeypatch.setattr(model, "step", step)
    llm = LLM(model)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda prompt: llm.generate(prompt, GREEDY), PROMPTS * 6))


def test_a_stream_that_is_collected_in_the_midst_of_a_step_ends_behind_it() -> None:
    model = FakeModel()
    llm = LLM(model)
    expected = LLM(FakeModel()).generate(PROMPTS[0], GREEDY)[0].token_ids
    held: dict[str, Iterator[StreamPiece]] = {"stream": llm.stream(PROMPTS[1], GREEDY)}
    next(held["stream"])
    inner = model.step

    def step(token_ids: torch.Tensor, state: Any) -> torch.Tensor:
        # As the garbage collector does it, whenever it wants: the last reference goes.
        held.clear()
        return inner(token_ids, state)

    model.step = step  # type: ignore[method-assign]
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected
    assert_nothing_is_left(llm)


def test_a_sequence_that_is_cancelled_in_a_step_by_a_thread_that_the_step_waits_for_ends_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for where in ("decode", "prefill", "admit"):
        runner = LateRunner(chunk=2)
        engine = Engine(runner)
        stays, goes = greedy([1, 2, 3], 9), greedy([2], 9)
        inner = getattr(runner, where)

        def call(*arguments: Any, inner: Any = inner, engine: Engine = engine, goes: Any = goes) -> Any:
            thread = threading.Thread(target=engine.cancel, args=(goes,))
            thread.start()
            thread.join(timeout=20)
            assert not thread.is_alive()
            return inner(*arguments)

        for sequence in (goes, stays):
            engine.add(sequence)
        engine.step()
        engine.step()
        monkeypatch.setattr(runner, where, call)
        engine.step()
        engine.add(greedy([4], 2))
        drained(engine)
        assert goes.finish_reason == "abort"
        assert made(goes) == solo(goes)[0][: len(made(goes))]
        assert (made(stays), stays.finish_reason) == solo(stays)
        assert runner.leaks == 0


def test_an_error_of_a_reader_ends_its_call_at_once_and_no_other() -> None:
    llm = LLM(FakeModel())
    other = llm.stream(PROMPTS[0], GREEDY)
    first = next(other)

    def broken(_index: int, _piece: StreamPiece) -> None:
        raise KeyError("the reader's own")

    with pytest.raises(KeyError, match="the reader's own") as caught:
        llm.generate(PROMPTS[1:], GREEDY, on_piece=broken)
    # Also while somebody holds the error, and with it the frames of the call.
    assert caught.value.__traceback__ is not None
    assert len(llm._steps._untold) == 1
    rest = [token for piece in other for token in piece.token_ids]
    assert [*first.token_ids, *rest] == LLM(FakeModel()).generate(PROMPTS[0], GREEDY)[0].token_ids
    assert_nothing_is_left(llm)


def test_a_call_within_a_readers_call_shares_the_steps() -> None:
    llm = LLM(FakeModel())
    expected = [LLM(FakeModel()).generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
    inner: list[list[int]] = []
    outer: list[int] = []

    def on_piece(_index: int, piece: StreamPiece) -> None:
        outer.extend(piece.token_ids)
        if len(outer) == 3:
            inner.append(llm.generate(PROMPTS[1], GREEDY)[0].token_ids)

    assert llm.generate(PROMPTS[0], GREEDY, on_piece=on_piece)[0].token_ids == expected[0]
    assert outer == expected[0]
    assert inner == [expected[1]]


def test_a_reader_is_told_of_all_tokens_although_the_step_of_the_last_one_fails() -> None:
    """One stream ends in the same step in which the device fails over another's prompt."""
    llm = LLM(FakeModel())
    runner: Any = llm.engine.runner
    expected = LLM(FakeModel()).generate(PROMPTS[1], GREEDY)[0].token_ids
    stream = llm.stream(PROMPTS[1], GREEDY)
    tokens = [token for _ in range(7) for token in next(stream).token_ids]
    runner.prefill = lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error"))
    with pytest.raises(DeviceError):
        llm.generate(PROMPTS[0], GREEDY)
    del runner.prefill
    (last,) = list(stream)
    assert (*tokens, *last.token_ids) == tuple(expected)
    assert last.finish_reason == "length"
    assert_nothing_is_left(llm)
    assert llm.generate(PROMPTS[1], GREEDY)[0].token_ids == expected


def test_a_device_that_fails_in_anothers_step_is_raised_whatever_on_error_says() -> None:
    llm = LLM(FakeModel())
    runner: Any = llm.engine.runner

    def on_piece(_index: int, _piece: StreamPiece) -> None:
        runner.decode = lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error"))
        with pytest.raises(DeviceError):
            list(llm.stream(PROMPTS[0], GREEDY))

    with pytest.raises(DeviceError) as caught:
        llm.generate(PROMPTS[1:3], GREEDY, on_error="return", on_piece=on_piece)
    assert not hasattr(caught.value, "__notes__")
    assert_nothing_is_left(llm)


def test_an_interrupt_in_a_step_frees_everything_and_the_engine_goes_on_afterwards() -> None:
    for where in ("admit", "prefill", "decode"):
        runner = LateRunner()
        engine = Engine(runner)
        sequences = [greedy([1, 2], 5), greedy([3], 9), greedy([4] * 6, 3)]
        for sequence in sequences:
            engine.add(sequence)
        inner = getattr(runner, where)

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        if where == "decode":
            engine.step()
            engine.step()
        setattr(runner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            drained(engine)
        setattr(runner, where, inner)
        assert runner.leaks == 0
        assert not engine.busy
        assert all("interrupted" in str(sequence.failure) for sequence in sequences)
        runner.unread.clear()
        again = greedy([1, 2], 5)
        engine.add(again)
        drained(engine)
        assert (made(again), again.finish_reason) == solo(again)


def test_thousands_of_requests_are_answered_in_their_order_and_leave_nothing() -> None:
    runner = LateRunner(capacity=3, pages=12)
    engine = Engine(runner)
    short = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 2, 3)]
    sequences = [new_sequence([n % 20 + 1, n % 7], short[n % 3]) for n in range(3000)]
    sequences[::500] = [greedy([1] * 200, 3) for _ in range(6)]
    for sequence in sequences:
        engine.add(sequence)
    drained(engine)
    admitted = [s.prompt_token_ids for s in sequences if s.failure is None]
    assert runner.admitted == admitted
    assert [n for n, s in enumerate(sequences) if s.finish_reason == "error"] == list(range(0, 3000, 500))
    assert runner.leaks == 0
    gc.collect()
