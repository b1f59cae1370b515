"""The CUDA runner at its limits: cancelled requests, memory that does not suffice, values that are not finite."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_cases import all_cases

import vtensors
from edited_checkpoints import Tensors, edited
from late_runner import drained, greedy, made
from vtensors.errors import RequestError, VtensorsError
from vtensors_engine.engine import Engine
from vtensors_engine.llm import LLM
from vtensors_engine.runner import Row
from vtensors_engine.sampling import SamplingParams

pytestmark = pytest.mark.gpu

SOURCE = next(case for case in all_cases() if case.name.startswith("kjv-dense-modelopt-mixed")).path
LONG, SHORT = list(range(100, 233)), [5, 6, 7]


@lru_cache(maxsize=1)
def _model() -> Any:
    return vtensors.load_model(SOURCE, device="cuda", dtype="bfloat16")


def _runner(**options: int) -> Any:
    from vtensors_engine.cuda.runner import CudaRunner

    return CudaRunner(_model(), **{"max_sequences": 2, "max_tokens": 512, "chunk": 32, **options})


def _all_free(runner: Any) -> bool:
    pages, slots = runner.caches.pages, runner.caches.slots
    return bool(pages.free_pages == pages.capacity and slots.free_slots == slots.capacity)


def test_a_cancelled_request_frees_its_pages_and_its_slot_wherever_it_is() -> None:
    runner = _runner()
    answers = {}
    for prompt in (LONG, SHORT):
        engine, alone = Engine(runner), greedy(prompt, 24)
        engine.add(alone)
        drained(engine)
        answers[len(prompt)] = made(alone)
    for steps in range(
        14
    ):  # waiting, in the midst of its five chunks, behind the first token, with steps unread
        engine, stays, goes, waits = (
            Engine(runner),
            greedy(SHORT, 24),
            greedy(LONG, 24),
            greedy(SHORT, 4),
        )
        for sequence in (stays, goes, waits):
            engine.add(sequence)
        for _ in range(steps):
            engine.step()
        engine.cancel(goes)
        drained(engine)
        told = f"cancelled behind {steps} steps with {len(made(goes))} tokens"
        assert goes.finish_reason == "abort", told
        assert made(goes) == answers[len(LONG)][: len(made(goes))], told
        assert made(stays) == answers[len(SHORT)], told
        assert made(waits) == answers[len(SHORT)][:4], told
        assert _all_free(runner), told


def test_a_request_that_can_never_fit_ends_alone() -> None:
    llm = LLM(_model(), max_sequences=2, max_tokens=256)
    params = [
        SamplingParams(temperature=0.0, seed=1, max_tokens=count, ignore_eos=True) for count in (8, 400, 8)
    ]
    answers = llm.generate([SHORT, LONG, LONG], params, on_error="return")
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert "never fit" in str(answers[1].error)
    with pytest.raises(RequestError, match="never fit"):
        llm.generate([LONG], params[1])
    assert _all_free(llm.engine.runner)


def test_requests_wait_for_pages_and_are_answered_as_alone() -> None:
    llm = LLM(_model(), max_sequences=8, max_tokens=256)
    prompts = [LONG[: 20 + 15 * i] for i in range(8)]
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert llm.generate(prompts, params) == alone
    assert _all_free(llm.engine.runner)


@contextlib.contextmanager
def _hardly_any_memory() -> Iterator[None]:
    """Small tensors have room, larger ones have none."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    held = list[torch.Tensor]()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while len(held) < 4096:
                held.append(torch.empty(3 << 19, dtype=torch.uint8, device="cuda"))
        print(f"{len(held)} blocks held, {torch.cuda.memory_reserved() >> 20} MiB reserved")
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_prompt_that_meets_the_end_of_the_memory_ends_alone() -> None:
    llm = LLM(_model(), max_sequences=4, max_tokens=4 * 1024)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=12, ignore_eos=True)
    prompts = [SHORT, [7, *(LONG * 8)[:980]], [9, 8]]
    wanted = llm.generate(prompts, params)
    with _hardly_any_memory():
        answers = llm.generate(prompts, params, on_error="return")
    print([(answer.finish_reason, str(answer.error)[:200]) for answer in answers])
    assert "not enough memory" in str(answers[1].error)
    assert (answers[0], answers[2]) == (wanted[0], wanted[2])
    assert _all_free(llm.engine.runner)
    assert llm.generate(prompts, params) == wanted


def _damaged(folder: Path, name: str, place: tuple[int, ...]) -> Path:
    def change(tensors: Tensors) -> None:
        tensors[name][place] = float("inf")

    return edited(SOURCE, folder, change)


def test_the_switch_for_bad_values_names_the_layer_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_DEBUG_NAN", "1")
    path = _damaged(tmp_path / "m", "model.layers.1.post_attention_layernorm.weight", (3,))
    llm = LLM(path, device="cuda", dtype="bfloat16", max_sequences=2, max_tokens=512)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=4)
    for prompt in (SHORT, LONG):
        (answer,) = llm.generate([prompt], params, on_error="return")
        print(answer.error)
        assert answer.finish_reason == "error"
        assert str(answer.error).startswith("layers.1: VT_DEBUG_NAN: the mlp is the first part")
    assert _all_free(llm.engine.runner)


def test_the_switch_for_bad_values_names_the_layer_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtensors_engine.cuda.runner import CudaRunner

    monkeypatch.setenv("VT_DEBUG_NAN", "1")
    path = _damaged(tmp_path / "m", "model.embed_tokens.weight", (300, 3))
    model: Any = vtensors.load_model(path, device="cuda", dtype="bfloat16")
    runner = CudaRunner(model, max_sequences=2, max_tokens=512)
    handle = runner.admit((5, 6, 7), 4)
    assert handle is not None
    step = runner.prefill(handle)
    assert step is not None
    assert step.failures() == {}
    runner.decode([Row(handle, 8)]).tokens()
    with pytest.raises(VtensorsError, match="the embedding is the first part") as caught:
        runner.decode([Row(handle, 300)])
    assert caught.value.tensor == "embed_tokens"


def test_the_switch_for_bad_values_does_not_look_at_what_ended_sequences_left_in_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtensors_engine.cuda.runner import CudaRunner

    monkeypatch.setenv("VT_DEBUG_NAN", "1")
    path = _damaged(tmp_path / "m", "model.embed_tokens.weight", (300, 3))
    model: Any = vtensors.load_model(path, device="cuda", dtype="bfloat16")
    runner = CudaRunner(model, max_sequences=4, max_tokens=512)

    def started(count: int) -> list[int]:
        handles = [runner.admit((5, 6, 7 + i), 4) for i in range(count)]
        for handle in handles:
            assert handle is not None
            assert runner.prefill(handle) is not None
        return [handle for handle in handles if handle is not None]

    handles = started(4)
    with pytest.raises(VtensorsError, match="the embedding"):
        runner.decode([Row(handle, 300 if i == 3 else 8) for i, handle in enumerate(handles)])
    for handle in handles:
        runner.release(handle)
    # The fourth row of the bucket is padding now.
    runner.decode([Row(handle, None) for handle in started(3)]).tokens()


def test_logits_that_are_not_finite_end_that_request_alone(tmp_path: Path) -> None:
    """The damaged row of the embeddings spoils only the sequence that has its token."""
    path = _damaged(tmp_path / "m", "model.embed_tokens.weight", (300, 3))
    llm = LLM(path, device="cuda", dtype="bfloat16", max_sequences=4, max_tokens=1024)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=12, ignore_eos=True)
    prompts = [SHORT, [5, 300, 7], LONG[:40]]
    answers = llm.generate(prompts, params, on_error="return")
    assert "not finite" in str(answers[1].error)
    alone = [llm.generate([prompt], params)[0] for prompt in (prompts[0], prompts[2])]
    assert [answers[0], answers[2]] == alone
    # A slot and pages that held NaN are as good as new.
    again = llm.generate([prompts[2], prompts[0]], params)
    assert again == alone[::-1]
