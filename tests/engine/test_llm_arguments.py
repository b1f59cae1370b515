from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_model import FakeModel
from vtensors.errors import RequestError
from vtensors_engine.devices import resolve_device, resolve_dtype
from vtensors_engine.llm import LLM


def test_a_path_is_loaded_with_the_resolved_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load_model(path: str, **options: Any) -> FakeModel:
        seen.update(options, path=path)
        return FakeModel()

    monkeypatch.setitem(sys.modules, "vtensors_engine.loading", SimpleNamespace(load_model=load_model))
    LLM("some/model", "main", "cpu", activations="declared")
    assert seen == {
        "path": "some/model",
        "revision": "main",
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "activations": "declared",
        "kv_cache_dtype": "auto",
        "lock": None,
    }
    LLM("some/model", device="cpu", dtype="bfloat16", lock="a.lock.json")
    assert (seen["dtype"], seen["activations"]) == (torch.bfloat16, None)
    assert seen["lock"] == "a.lock.json"


def test_a_loaded_model_takes_no_loading_arguments() -> None:
    with pytest.raises(RequestError, match="loaded model"):
        LLM(FakeModel(), dtype="float32")
    with pytest.raises(RequestError, match="max_sequences"):
        LLM(FakeModel(), max_sequences=0)


def test_devices_and_dtypes_have_defaults_and_refuse_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(None) == torch.device("cpu")
    for device in ("gpu", "meta", "cuda", "cuda:0"):
        with pytest.raises(RequestError, match=device):
            resolve_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device(None) == torch.device("cuda")
    with pytest.raises(RequestError, match="cuda:1"):
        resolve_device("cuda:1")
    assert resolve_dtype(None, torch.device("cuda")) is None
    assert resolve_dtype("torch.float16", torch.device("cpu")) == torch.float16
    for dtype in ("int8", torch.float64, "fp8"):
        with pytest.raises(RequestError, match="float32, bfloat16, float16"):
            resolve_dtype(dtype, torch.device("cpu"))
