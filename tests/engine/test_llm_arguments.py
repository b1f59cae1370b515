from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vtensors
from fake_model import FakeModel, fake_files
from vtensors.errors import RequestError
from vtensors_engine.devices import resolve_device, resolve_dtype
from vtensors_engine.llm import LLM
from vtensors_engine.sampling import SamplingParams


def test_a_path_is_loaded_with_the_resolved_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load_model(path: str, **options: Any) -> FakeModel:
        seen.update(options, path=path)
        return FakeModel()

    monkeypatch.setitem(sys.modules, "vtensors_engine.loading", SimpleNamespace(load_model=load_model))
    LLM("some/model", "cpu", torch.float32, "declared", revision="main")
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
    with pytest.raises(RequestError, match="loaded model"):
        LLM(FakeModel(), kv_cache_dtype="fp8")
    model: Any = FakeModel()
    model.kv_cache = "fp8"
    LLM(model, kv_cache_dtype="fp8")
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


@pytest.mark.parametrize("text", [b"word", bytearray(b"word"), memoryview(b"word")])
@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [text]])
def test_bytes_are_not_taken_for_token_ids(text: Any, wrap: Any) -> None:
    with pytest.raises(RequestError, match="decode it to text"):
        LLM(FakeModel()).generate(wrap(text))


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), torch.tensor([[1, 2]]), [torch.tensor([1, 2])]])
def test_tensors_of_token_ids_are_refused_with_what_to_do(ids: Any) -> None:
    with pytest.raises(RequestError, match=r"pass its \.tolist\(\)"):
        LLM(FakeModel()).generate(ids)


def test_generated_ids_can_be_appended_to_a_prompt_as_they_are() -> None:
    llm = LLM(FakeModel())
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    (whole,) = llm.generate([[1, 2, 3]], greedy)
    begun_params = SamplingParams(temperature=0.0, max_tokens=2)
    (begun,) = llm.generate([[1, 2, 3]], begun_params)
    (ended,) = llm.generate([begun.prompt_token_ids + begun.token_ids], begun_params)
    assert begun.token_ids + ended.token_ids == whole.token_ids


@pytest.mark.parametrize("prompt", [[], "", [[]]])
def test_an_empty_prompt_is_called_empty_when_it_is_streamed(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        LLM(FakeModel()).stream(prompt)


@pytest.mark.parametrize("source", [None, 3, b"here", ["here"]])
def test_what_is_neither_text_nor_a_path_names_no_checkpoint(source: Any) -> None:
    with pytest.raises(RequestError, match="names no checkpoint"):
        vtensors.open_checkpoint(source)
    with pytest.raises(RequestError, match="names no checkpoint"):
        vtensors.load_model(source, device="cpu")


def test_without_a_tokenizer_ids_work_and_text_is_refused_with_the_file() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM(FakeModel(files=fake_files(tokenizer__json=None)))
    completion = llm.generate([5, 6], greedy)[0]
    assert (len(completion.token_ids), completion.text) == (8, None)
    for call in (
        lambda: llm.generate("text", greedy),
        lambda: llm.generate([5], SamplingParams(stop="x")),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(RequestError, match=r"tokenizer\.json(.|\n)*lists of token ids"):
            call()


@pytest.mark.parametrize("model", [None, 5, b"folder", ["folder"]])
def test_what_names_no_model_is_refused(model: object) -> None:
    with pytest.raises(RequestError, match="this is no model") as caught:
        LLM(model)  # type: ignore[arg-type]
    assert caught.value.accepted
