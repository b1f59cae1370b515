"""The CUDA device of a model: torch's current one while it is bound and run, and one and the same for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from tiny_decoders import tiny_config, tiny_model
from vtensors_kernels.compiling.launch import launching_on
from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.models import decoder

TOKENS = torch.arange(4)


def test_a_model_is_bound_and_run_with_its_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    inside: list[bool] = []

    @contextmanager
    def launching(device: torch.device) -> Iterator[None]:
        entered.append(device)
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(decoder, "launching_on", launching)
    model = tiny_model(tiny_config("llama"))
    assert len(entered) == 1
    model.logits(TOKENS[None])
    model.step(TOKENS, model.new_state())
    assert entered == [torch.device("cpu")] * 3
    assert not inside


def test_the_current_device_is_left_alone_where_there_is_no_gpu() -> None:
    with launching_on(torch.device("cpu")):
        pass
    if not torch.cuda.is_available():
        with launching_on(torch.device("cuda:1")):
            pass


@pytest.mark.parametrize(("asked", "current", "bound"), [("cuda", 1, "cuda:1"), ("cuda:2", 1, "cuda:2")])
def test_a_device_without_an_index_is_the_current_one_for_good(
    asked: str, current: int, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[torch.device | str] = []

    def noted(config: object, weights: object, options: BuildOptions) -> None:
        built.append(options.device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(decoder, "launching_on", lambda device: nullcontext())
    monkeypatch.setattr(decoder, "_built", noted)
    config: Any = None
    decoder.build_decoder(config, {}, BuildOptions(dtype=torch.bfloat16, device=asked, kernels=()))
    assert built == [torch.device(bound)]
