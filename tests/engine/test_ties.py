"""Equal logits: the lowest token, and the lowest experts, in whole models and on either device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_cases import Case, all_cases

import vtensors
from cuda_driving import Driven, run_alone, run_together
from edited_checkpoints import Tensors, edited, repeat_rows
from vtensors_engine.runner import ReferenceRunner
from vtensors_engine.sampling import SamplingParams, largest_token, new_generator, sample

MIXTURE = "qwen35moe-modelopt-moe-mixed-w4a16"
# A plain head, an NVFP4 head of a mixture, an NVFP4 head of a trained model.
HEADS = ["qwen35-llmcompressor-mixed", MIXTURE, "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn"]
PROMPTS = [[5], [7, 11, 200], list(range(40, 110))]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def _case(name: str) -> Case:
    return next(case for case in all_cases() if case.name == name)


def _runner(path: Path, device: str) -> Any:
    """float32 on a CPU, bfloat16 on CUDA."""
    model = vtensors.load_model(path, device=device, dtype="float32" if device == "cpu" else "bfloat16")
    if device == "cpu":
        return ReferenceRunner(model)
    # Imported here: a CPU needs nothing of CUDA.
    from vtensors_engine.cuda.runner import CudaRunner

    return CudaRunner(model, max_sequences=4, max_tokens=4 * 128)


def _first_of_four(vocabulary: int) -> list[int]:
    """Rows 2 i, 2 i + 1 and both of them half a vocabulary further are one."""
    return [row % (vocabulary // 2) // 2 * 2 for row in range(vocabulary)]


@on_each_device
@pytest.mark.parametrize("name", HEADS)
def test_of_equal_rows_of_the_head_the_lowest_id_is_chosen(name: str, device: str, tmp_path: Path) -> None:
    source = _case(name).path
    vocabulary = vtensors.open_checkpoint(source).modules["lm_head"].shape[0]
    sources = _first_of_four(vocabulary)
    path = edited(source, tmp_path / "m", lambda tensors: repeat_rows(tensors, "lm_head", sources))
    runner = _runner(path, device)
    together = run_together(runner, PROMPTS, 12)
    alone = [run_alone(runner, prompt, 12) for prompt in PROMPTS]
    greedy, generator = SamplingParams(temperature=0.0, logprobs=4), new_generator(1)[0]
    for driven in (*together, *alone):
        for token, row in zip(driven.tokens, driven.logits, strict=True):
            different = int((row != row[torch.tensor(sources)]).sum())
            assert different == 0, f"{different} of {vocabulary} logits of equal rows differ"
            assert token == largest_token(row) == sources[token]
            chosen = sample(row, greedy, generator)
            assert chosen.token_id == token
            assert chosen.top_logprobs[0][0] == token
            best = [index for index, _ in chosen.top_logprobs]
            if device == "cpu":  # in 16 bits other rows may be as large
                assert best == [token, token + 1, token + vocabulary // 2, token + vocabulary // 2 + 1]


@on_each_device
def test_of_equal_rows_of_the_router_the_lowest_experts_are_chosen(device: str, tmp_path: Path) -> None:
    """Two of eight are chosen of four that are equal: what the third and fourth hold cannot matter."""
    source = _case(MIXTURE).path

    def tie(tensors: Tensors) -> None:
        for layer in range(2):
            repeat_rows(tensors, f"model.layers.{layer}.mlp.gate", [0] * 4 + [4] * 4)

    def flip(tensors: Tensors, experts: tuple[int, ...]) -> None:
        tie(tensors)
        parts = tuple(
            f".experts.{expert}.{part}_proj.weight" for expert in experts for part in ("up", "down")
        )
        for name in [name for name in tensors if name.endswith(parts)]:
            tensors[name] = tensors[name].bitwise_not()  # other codes of the same scales

    def driven(folder: str, experts: tuple[int, ...]) -> list[Driven]:
        path = edited(source, tmp_path / folder, lambda tensors: flip(tensors, experts))
        return run_together(_runner(path, device), PROMPTS, 8)

    wanted = driven("tied", ())
    for ours, theirs in zip(driven("highest", (2, 3, 6, 7)), wanted, strict=True):
        assert ours.same_as(theirs), "an expert with a higher number was chosen among equals"
    for experts in ((0, 4), (1, 5)):
        changed = zip(driven(f"lowest-{experts[0]}", experts), wanted, strict=True)
        assert not any(ours.same_as(theirs) for ours, theirs in changed), f"{experts} are not used"
