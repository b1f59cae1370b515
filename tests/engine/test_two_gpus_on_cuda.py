"""Two GPUs in one process: the second gives what the first gives, alone, in turns and at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle_cases import all_cases

import vtensors
from vtensors_engine.llm import LLM
from vtensors_engine.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
DENSE, MIXTURE = "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn", "qwen35moe-modelopt-moe-mixed-w4a16"
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def _llm(name: str, device: str) -> LLM:
    (path,) = [case.path for case in all_cases() if case.name == name]
    return LLM(path, device=device, dtype="bfloat16", max_sequences=8, max_tokens=2048)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_STRICT", "fallbacks,untested")


def _prompts(llm: LLM) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    sizes = (1, 7, 40, 90)
    return [torch.randint(3, llm.model.vocab_size, (size,), generator=generator).tolist() for size in sizes]


def _answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(found.token_ids) for found in llm.generate(_prompts(llm), PARAMS)]


@pytest.mark.parametrize("name", [DENSE, MIXTURE])
def test_the_second_gpu_gives_the_answers_of_the_first(name: str) -> None:
    assert torch.cuda.current_device() == 0
    first, second = _llm(name, "cuda:0"), _llm(name, "cuda:1")
    assert type(second.engine.runner).__name__ == "CudaRunner"
    wanted = _answers(first)
    assert _answers(second) == wanted
    assert torch.cuda.current_device() == 0
    # In turns and at the same time, with either as the current device.
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(_answers, llm) for _ in range(3) for llm in (first, second)]:
            assert done.result() == wanted
    with torch.cuda.device(1):
        assert _answers(first) == wanted
        assert _answers(second) == wanted
        assert torch.cuda.current_device() == 1


def test_logits_of_the_second_gpu_are_the_same_bits() -> None:
    (path,) = [case.path for case in all_cases() if case.name == DENSE]
    models = [vtensors.load_model(path, device=f"cuda:{index}", dtype=torch.bfloat16) for index in range(2)]
    ids = torch.arange(3, 35)[None]
    first, second = (model.logits(ids.to(f"cuda:{index}")) for index, model in enumerate(models))
    assert second.device == torch.device("cuda:1")
    assert torch.equal(first.cpu(), second.cpu())
