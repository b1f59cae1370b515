"""The launches of the grouped experts, noted instead of made: which kernels, with how many arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import attrs
import pytest
import torch

from experts_cases import packed_reference, random_choice, random_experts
from vtensors_kernels.compiling.functions import Wanted
from vtensors_kernels.compiling.sources import load_source
from vtensors_kernels.experts import batch_launches, launches


def parameters(source: str) -> int:
    """How many the kernel of a source takes."""
    text = re.sub(r"//[^\n]*", "", load_source(source).text)
    kernel = re.search(r'extern "C" __global__.*?(?:VT_FUNCTION|experts_\w+)\((.*?)\)\s*\{', text, re.DOTALL)
    assert kernel is not None
    return kernel[1].count(",") + 1


@pytest.mark.parametrize(
    ("m", "top", "kernels"),
    [
        (1, 8, "linear down"),
        (5, 8, "linear down"),
        (6, 8, "gate outputs"),
        (32, 8, "gate outputs"),
        (32, 1, "linear down"),
        (33, 4, "linear linear finish"),
        (33, 8, "group linear linear finish"),
    ],
)
def test_launches_have_the_arguments_that_their_kernels_take(
    m: int, top: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []

    @attrs.define(kw_only=True)
    class Noted:
        function: SimpleNamespace
        grid: tuple[int, int, int]
        block: tuple[int, int, int]
        arguments: int
        shared_bytes: int
        dependent: bool

        def call(self, _stream: int, *given: int) -> None:
            assert len(given) == self.arguments == parameters(self.function.source)
            assert all(isinstance(one, int) for one in given)
            launched.append(self.function.name.split("_")[1])

    def compiled(wanted: Sequence[Wanted], _index: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=one.name, source=one.source, target="sm_90a") for one in wanted]

    packed = packed_reference(random_experts("nvfp4", 9, 64, 32, shared=True), 9)
    blocks = packed.gate_up.blocks
    # As if on a CUDA device while the call is made.
    there = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0))
    monkeypatch.setattr(batch_launches, "Launch", Noted)
    monkeypatch.setattr(launches, "compile_many", compiled)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(multi_processor_count=132, major=9, minor=0),
    )
    stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    call = launches.GroupedExperts(
        attrs.evolve(packed, gate_up=attrs.evolve(packed.gate_up, blocks=there)), torch.bfloat16
    )
    call.packed = call._batch.packed = packed
    assert call.packed.gate_up.blocks is blocks
    chosen, router = random_choice(m, 9, top)
    x, wide = torch.zeros(m, 64).bfloat16(), torch.zeros(m, 5).bfloat16()
    assert call(x, chosen, router, wide[:, 4:], None, x).shape == (m, 64)
    assert launched == kernels.split()
