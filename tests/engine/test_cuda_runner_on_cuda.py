"""The CUDA runner over whole checkpoints: right against the reference, and the same bits in any company."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from oracle_cases import DATA, Case, all_cases
from safetensors.torch import load_file

import vtensors
from cuda_driving import prefilled, run_alone, run_together
from vtensors_engine.cuda.runner import CudaRunner
from vtensors_engine.loading import LoadedModel
from vtensors_engine.runner import Row

pytestmark = pytest.mark.gpu

CASES = [case for case in all_cases() if DATA in case.oracle_folder.parents]
# As in test_checkpoints_on_cuda.py: shares of the largest logit of the float32 reference.
MOST, MEAN = 0.15, 0.012
# One dense hybrid with the real head sizes, one with experts, one without delta nets.
KINDS = [
    case
    for case in CASES
    if case.name.startswith(("kjv-dense", "qwen35moe", "qwen3-modelopt", "qwen35-llmcompressor-mixed"))
]
each_kind = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


@lru_cache(maxsize=4)
def _model(case: Case) -> LoadedModel:
    return vtensors.load_model(case.path, device="cuda", dtype="bfloat16")


def _runner(case: Case, **options: int | bool) -> CudaRunner:
    return CudaRunner(
        _model(case),
        max_sequences=int(options.get("max_sequences", 32)),
        max_tokens=int(options.get("max_tokens", 32 * 512)),
        chunk=int(options.get("chunk", 2048)),
        eager=bool(options.get("eager", False)),
    )


def _prompt(case: Case, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, _model(case).vocab_size, (length,), generator=generator).tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_prompt_and_forced_tokens_give_the_oracles_logits(case: Case, cut: int) -> None:
    tensors = load_file(case.oracle_folder / "tensors.safetensors")
    ids, wanted = tensors["input_ids"][0].tolist(), tensors["logits"][0]
    driven = run_alone(_runner(case), ids[:cut], len(ids) - cut + 1, forced=ids[cut:])
    ours = torch.stack(driven.logits).float()
    error, largest = (ours - wanted[cut - 1 :]).abs(), wanted.abs().max()
    print(
        f"{case.name} {cut}: at most {float(error.max() / largest):.4f}, mean {float(error.mean() / largest):.4f}"
    )
    assert float(error.max()) <= MOST * float(largest)
    assert float(error.mean()) <= MEAN * float(largest)


@each_kind
def test_a_sequence_has_the_same_bits_alone_and_in_any_company(case: Case) -> None:
    runner = _runner(case)
    lengths = [(7 * i) % 61 + 1 for i in range(32)]
    prompts = [_prompt(case, length, seed) for seed, length in enumerate(lengths)]
    alone = [run_alone(runner, prompt, 9) for prompt in prompts]
    for many in (2, 3, 5, 8, 13, 17, 24, 32):
        together = run_together(runner, prompts[:many], 9)
        for index in range(many):
            assert together[index].same_as(alone[index]), f"row {index} of {many}"
    backwards = run_together(runner, prompts[::-1], 9)
    for index in range(32):
        assert backwards[31 - index].same_as(alone[index]), f"row {31 - index} backwards"
    assert runner.caches.pages.free_pages == runner.caches.pages.capacity


@each_kind
def test_eager_launches_and_graphs_give_the_same_bits_ten_times(case: Case) -> None:
    prompts = [_prompt(case, length) for length in (3, 64, 20)]
    wanted = run_together(_runner(case, eager=True), prompts, 12)
    runner = _runner(case)
    for _ in range(10):
        for ours, theirs in zip(run_together(runner, prompts, 12), wanted, strict=True):
            assert ours.same_as(theirs)


@each_kind
@pytest.mark.parametrize("length", [1, 2, 3, 4, 62, 63, 64, 65, 127, 128, 129])
def test_a_reused_slot_and_reused_pages_leave_no_trace(case: Case, length: int) -> None:
    runner = _runner(case, max_sequences=2, max_tokens=640)
    prompt = _prompt(case, length)
    fresh = run_alone(runner, prompt, 8)
    for other in (200, 90):
        run_alone(runner, _prompt(case, other, seed=1), 70)
        assert run_alone(runner, prompt, 8).same_as(fresh)


@each_kind
def test_chunks_of_a_prompt_hand_their_state_over(case: Case) -> None:
    prompt = _prompt(case, 200)
    whole = run_alone(_runner(case), prompt, 6)
    for chunk in (64, 77, 199):
        pieces = run_alone(_runner(case, chunk=chunk), prompt, 6)
        largest = max(float(row.abs().max()) for row in whole.logits)
        error = max(
            float((a.float() - b.float()).abs().max())
            for a, b in zip(pieces.logits[:1], whole.logits[:1], strict=True)
        )
        print(f"{case.name} chunks of {chunk}: {error / largest:.4f}")
        assert error <= MOST * largest


@each_kind
def test_prompt_then_tokens_is_as_the_whole_prompt(case: Case) -> None:
    prompt = _prompt(case, 150)
    whole = run_alone(_runner(case), prompt, 1)
    pieces = run_alone(_runner(case), prompt[:100], 51, forced=prompt[100:])
    error = (pieces.logits[-1].float() - whole.logits[0].float()).abs().max()
    assert float(error) <= MOST * float(whole.logits[0].abs().max())


@each_kind
def test_a_sequence_that_leaves_does_not_disturb_those_that_stay(case: Case) -> None:
    runner = _runner(case)
    prompts = [_prompt(case, 10 + i, seed=i) for i in range(5)]
    alone = [run_alone(runner, prompt, 12) for prompt in prompts]
    handles = [runner.admit(tuple(prompt), 12) for prompt in prompts]
    tokens = [prefilled(runner, handle).tokens() for handle in handles if handle is not None]
    running = dict(enumerate(handle for handle in handles if handle is not None))
    for number in range(11):
        if number in (2, 5, 6):
            index = {2: 1, 5: 0, 6: 4}[number]
            runner.release(running.pop(index))
        step = runner.decode([Row(handle, None) for handle in running.values()])
        for index, token in zip(running, step.tokens(), strict=True):
            tokens[index].append(token)
    for index, found in enumerate(tokens):
        assert found == alone[index].tokens[: len(found)]


def test_requests_beyond_the_memory_are_refused_or_wait() -> None:
    runner = _runner(KINDS[0], max_sequences=2, max_tokens=256)
    with pytest.raises(vtensors.VtensorsError, match="never fit"):
        runner.admit((1, 2, 3), 300)
    first = runner.admit((1, 2, 3), 100)
    second = runner.admit((1, 2, 3), 100)
    assert first is not None
    assert second is not None
    assert runner.admit((1,), 1) is None
    runner.release(first)
    assert runner.admit((1,), 1) is not None


def test_caches_that_cannot_fit_are_refused_before_damage() -> None:
    model = _model(KINDS[0])
    before = torch.cuda.memory_allocated()
    with pytest.raises(vtensors.VtensorsError, match="not enough free memory"):
        CudaRunner(model, max_sequences=4, max_tokens=1 << 40)
    assert torch.cuda.memory_allocated() == before
    assert len(run_alone(_runner(KINDS[0]), [1, 2, 3], 4).tokens) == 4
