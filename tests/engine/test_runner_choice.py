"""Which runner a model gets: nothing of CUDA on a CPU; on CUDA the fast one, or the reference and why."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fake_model import FakeModel
from vtensors.errors import RequestError, VtensorsError
from vtensors_engine.llm import LLM
from vtensors_engine.runner import NoRoomError, ReferenceRunner
from vtensors_engine.runner_choice import make_runner


class CudaModel(FakeModel):
    """Says that it is on a CUDA device; nothing of it is computed there."""

    device = torch.device("cuda:1")
    dtype = torch.bfloat16

    def __init__(self, *strict: str) -> None:
        super().__init__()
        switches = SimpleNamespace(names=lambda name: strict if name == "VT_STRICT" else ())
        self.checkpoint: Any = SimpleNamespace(snapshot=self.checkpoint.snapshot, switches=switches)


def cuda_runner(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    module = ModuleType("vtensors_engine.cuda.runner")
    module.CudaRunner = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vtensors_engine.cuda.runner", module)


def failing(error: Exception) -> Any:
    def build(_model: Any, **_options: Any) -> None:
        raise error

    return build


def test_a_cpu_gets_the_reference_runner_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        runner = make_runner(FakeModel(), max_sequences=3)  # type: ignore[arg-type]
    assert isinstance(runner, ReferenceRunner)
    assert runner.capacity == 3
    assert caplog.messages == []


def test_nothing_of_cuda_is_imported_on_a_cpu() -> None:
    code = (
        "import sys, vtensors, vtensors_engine.bundled as b\n"
        "llm = vtensors.LLM(b.bundled_checkpoint(), device='cpu')\n"
        "llm.generate('In', vtensors.SamplingParams(max_tokens=2))\n"
        "print([name for name in sys.modules if name.startswith(('vtensors_engine.cuda', 'cupy', 'cuda'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cuda_gets_the_cuda_runner_with_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def build(model: Any, **options: Any) -> ReferenceRunner:
        seen.update(options, model=model)
        return ReferenceRunner(model)

    cuda_runner(monkeypatch, build)
    model = CudaModel("fallbacks")
    runner = LLM(model, max_sequences=5, max_tokens=640).engine.runner
    assert isinstance(runner, ReferenceRunner)
    assert seen == {"model": model, "max_sequences": 5, "max_tokens": 640}


@pytest.mark.parametrize("error", [VtensorsError("no kernel for it"), ImportError("no module named cupy")])
def test_a_cuda_runner_that_cannot_serve_is_told_once_with_its_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_runner(monkeypatch, failing(error))
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        runner = make_runner(CudaModel(), max_sequences=3)
    assert isinstance(runner, ReferenceRunner)
    assert caplog.messages == [
        f"fallback: cuda:1: the reference runner is used, which is exact, not fast: {error}"
    ]
    with pytest.raises(RequestError, match="VT_STRICT=fallbacks") as caught:
        make_runner(CudaModel("fallbacks"), max_sequences=3)
    assert caught.value.seen == str(error)
    assert caught.value.__cause__ is error


def test_float32_on_cuda_is_a_fallback_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_runner(monkeypatch, failing(AssertionError("not asked")))
    model = CudaModel()
    model.dtype = torch.float32
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        make_runner(model, max_sequences=1)
    assert "not torch.float32" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried 2 GiB"), NoRoomError("2 GiB do not fit")])
def test_a_device_without_memory_is_no_fallback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_runner(monkeypatch, failing(error))
    with pytest.raises(RequestError, match="2 GiB"):
        make_runner(CudaModel(), max_sequences=1)


def test_more_sequences_than_can_run_at_a_time_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(model: Any, *, max_sequences: int, max_tokens: int | None) -> ReferenceRunner:
        return ReferenceRunner(model, max_sequences=min(max_sequences, 64))

    cuda_runner(monkeypatch, build)
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        make_runner(CudaModel(), max_sequences=64)
        assert caplog.messages == []
        assert make_runner(CudaModel(), max_sequences=65).capacity == 64
    assert caplog.messages == [
        "max_sequences is 65: 64 run at a time, which is the most on CUDA, and the others wait"
    ]


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_bad_max_tokens_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        LLM(FakeModel(), max_tokens=value)
