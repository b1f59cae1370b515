"""`LLM` on a CUDA device: many prompts as alone, sampling by the rule of the CPU, streams, FP8 caches, no fallback."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import attrs
import pytest
import torch
from oracle_cases import Case, all_cases

import vtensors
from cuda_driving import run_alone, run_together
from drawing_cases import rounding_allows
from vtensors_engine.drawing import drawn_token, new_draw
from vtensors_engine.llm import LLM
from vtensors_engine.outputs import Completion
from vtensors_engine.sampling import SamplingParams, new_generator, sample

pytestmark = pytest.mark.gpu

DEVICE, DTYPE = "cuda", "bfloat16"
DENSE = "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn"
MIXTURE = "qwen35moe-modelopt-moe-mixed-w4a16"
ATTENTION = "qwen3-modelopt-nvfp4-kvfp8"
KINDS = [DENSE, MIXTURE, ATTENTION, "qwen35-llmcompressor-mixed"]
# As in test_checkpoints_on_cuda.py: shares of the largest logit of the float32 reference.
MOST, MEAN = 0.15, 0.012
GREEDY: dict[str, Any] = {"temperature": 0.0}
SETTINGS: list[dict[str, Any]] = [
    {**GREEDY, "logprobs": 3},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 1.3, "top_k": 20, "logprobs": 5},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 2},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "logprobs": 2},
]


def case_of(name: str) -> Case:
    return next(case for case in all_cases() if case.name == name)


@lru_cache(maxsize=4)
def _llm(name: str, kv_cache_dtype: str = "auto") -> LLM:
    return LLM(
        case_of(name).path,
        device=DEVICE,
        dtype=DTYPE,
        kv_cache_dtype=kv_cache_dtype,
        max_sequences=32,
        max_tokens=32 * 256,
    )


def _prompt(llm: LLM, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(3, llm.model.vocab_size, (length,), generator=generator).tolist()
    return ids


def _told(ours: Completion, alone: Completion) -> str:
    """The first place where they differ."""
    pairs = enumerate(zip(ours.token_ids, alone.token_ids, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours.token_ids), len(alone.token_ids)))
    return (
        f"prompt of {len(ours.prompt_token_ids)}: token {place} of {len(alone.token_ids)}; "
        f"{ours.token_ids[place : place + 3]} instead of {alone.token_ids[place : place + 3]}; "
        f"ended by {ours.finish_reason} instead of {alone.finish_reason}; error {ours.error}"
    )


@pytest.mark.fault("B31")
@pytest.mark.parametrize("name", KINDS)
def test_forty_prompts_of_different_lengths_are_answered_as_alone(name: str) -> None:
    llm = _llm(name)
    prompts = [_prompt(llm, (37 * i) % 97 + 1, seed=i) for i in range(40)]
    settings = [SETTINGS[i % len(SETTINGS)] if i % 3 == 0 else GREEDY for i in range(40)]
    params = [
        SamplingParams(**own, max_tokens=(11 * i) % 24 + 1, seed=i, ignore_eos=i % 2 == 0)
        for i, own in enumerate(settings)
    ]
    together = llm.generate(prompts, params)
    greedy = llm.generate(
        prompts, [attrs.evolve(own, temperature=0.0, logprobs=None) for own in params]
    )  # steps ahead throughout
    different = list[str]()
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        (alone,) = llm.generate([prompt], own)
        if together[index] != alone:
            different.append(_told(together[index], alone))
        (alone,) = llm.generate([prompt], attrs.evolve(own, temperature=0.0, logprobs=None))
        if greedy[index] != alone:
            different.append("greedy, " + _told(greedy[index], alone))
    assert not different, "\n".join(different)


@pytest.mark.parametrize("name", [DENSE, MIXTURE])
def test_tokens_and_log_probabilities_follow_the_rule_of_the_cpu_for_the_same_logits(name: str) -> None:
    llm = _llm(name)
    prompts = [_prompt(llm, 5 + i, seed=50) for i in range(len(SETTINGS))]
    params = [SamplingParams(**own, max_tokens=20, seed=11, ignore_eos=True) for own in SETTINGS]
    runner: Any = llm.engine.runner
    for prompt, own, answer in zip(prompts, params, llm.generate(prompts, params), strict=True):
        driven = run_alone(runner, prompt, len(answer.token_ids), forced=answer.token_ids)
        generator, _ = new_generator(own.seed)
        wanted = [sample(row, own, generator) for row in driven.logits]
        assert list(answer.logprobs or ()) == wanted, own


@pytest.mark.parametrize("name", [DENSE, MIXTURE])
def test_tokens_drawn_on_the_device_follow_the_rule_of_the_cpu_for_the_same_logits(name: str) -> None:
    llm = _llm(name)
    runner: Any = llm.engine.runner
    assert runner.draws
    settings = [SETTINGS[1 + i % 4] for i in range(8)]
    params = [
        SamplingParams(**{**own, "logprobs": None}, max_tokens=40, seed=i, ignore_eos=True)
        for i, own in enumerate(settings)
    ]
    prompts = [_prompt(llm, 5 + i, seed=60) for i in range(len(params))]
    others = 0
    for prompt, own, answer in zip(prompts, params, llm.generate(prompts, params), strict=True):
        driven = run_alone(runner, prompt, len(answer.token_ids), forced=answer.token_ids)
        generator, _ = new_generator(own.seed)
        for row, token in zip(driven.logits, answer.token_ids, strict=True):
            draw = new_draw(own, generator)
            if token != drawn_token(row, draw):
                others += 1
                with_point = [own.temperature, own.top_k, own.top_p, own.min_p, draw.point]
                assert rounding_allows(row, torch.tensor(with_point, dtype=torch.float64), token), own
    print(f"{name}: {others} of {sum(own.max_tokens for own in params)} tokens are another one by rounding")


@pytest.mark.parametrize("name", [DENSE, MIXTURE])
def test_a_sampled_sequence_has_the_same_tokens_alone_and_among_31_others(name: str) -> None:
    llm = _llm(name)
    settings = [{**own, "logprobs": None} for own in SETTINGS]
    params = [
        SamplingParams(**settings[i % 5], max_tokens=12 + i % 7, seed=i, ignore_eos=True) for i in range(32)
    ]
    prompts = [_prompt(llm, (37 * i) % 97 + 1, seed=i) for i in range(32)]
    together = llm.generate(prompts, params)
    assert llm.generate(prompts, params) == together
    assert llm.generate(prompts[::-1], params[::-1]) == together[::-1]
    for index in range(32):
        (alone,) = llm.generate([prompts[index]], params[index])
        assert alone == together[index], _told(together[index], alone)
    # The host's choice among neighbours that the device draws for.
    mixed = [attrs.evolve(own, logprobs=0) if i % 5 == 2 else own for i, own in enumerate(params)]
    for ours, theirs, own in zip(llm.generate(prompts, mixed), together, mixed, strict=True):
        if own.logprobs is None:
            assert ours == theirs, _told(ours, theirs)


@pytest.mark.parametrize("name", KINDS)
def test_a_supported_model_has_no_fallback(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vtensors_engine.cuda.runner import CudaRunner

    monkeypatch.setenv("VT_STRICT", "fallbacks")
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        llm = LLM(case_of(name).path, device=DEVICE, dtype=DTYPE, max_sequences=2, max_tokens=512)
    assert isinstance(llm.engine.runner, CudaRunner)
    assert [line for line in caplog.messages if "fallback" in line] == []
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize("name", [ATTENTION, DENSE])
def test_an_fp8_cache_holds_codes_and_gives_the_logits_of_the_reference(name: str) -> None:
    llm = _llm(name, "fp8")
    runner: Any = llm.engine.runner
    stored = {layer.keys.dtype for layer in runner.caches.layers if hasattr(layer, "keys")}
    assert stored == {torch.float8_e4m3fn}
    prompt = _prompt(llm, 70)
    driven = run_alone(runner, prompt, 8, forced=prompt[:8])
    ours = torch.stack(driven.logits).float()
    reference = vtensors.load_model(case_of(name).path, device="cpu", dtype="float32", kv_cache_dtype="fp8")
    wanted = reference.logits(torch.tensor([prompt + prompt[:7]]))[0, len(prompt) - 1 :]
    error, largest = (ours - wanted).abs(), wanted.abs().max()
    most, mean = float(error.max() / largest), float(error.mean() / largest)
    plain: Any = _llm(name).engine.runner
    wide = torch.stack(run_alone(plain, prompt, 8, forced=prompt[:8]).logits).float()
    moved = float((ours - wide).abs().mean() / largest)
    print(f"{name}: error at most {most:.4f}, mean {mean:.4f}; 16-bit cache {moved:.4f} away")
    assert most <= MOST
    assert mean <= MEAN
    assert moved > 0
    others = [_prompt(llm, 10 + i, seed=i) for i in range(6)]
    together = run_together(runner, [*others, prompt], 8, forced={6: prompt[:8]})
    assert together[6].same_as(driven)


def test_two_streams_at_a_time_and_one_that_is_left_early() -> None:
    llm = _llm(DENSE)
    runner: Any = llm.engine.runner
    params = SamplingParams(**GREEDY, seed=1, max_tokens=30, ignore_eos=True)
    prompts = [_prompt(llm, 12), _prompt(llm, 40)]
    wanted = [answer.token_ids for answer in llm.generate(prompts, params)]
    first, second = (llm.stream(prompt, params) for prompt in prompts)
    tokens: list[list[int]] = [[], []]
    for _ in range(9):
        for own, stream in zip(tokens, (first, second), strict=True):
            own += next(stream).token_ids
    first.close()  # type: ignore[attr-defined]
    for piece in second:
        tokens[1] += piece.token_ids
    assert tokens[0] == wanted[0][:9]
    assert tokens[1] == wanted[1]
    assert runner.caches.pages.free_pages == runner.caches.pages.capacity
    assert runner.caches.slots.free_slots == runner.caches.slots.capacity
