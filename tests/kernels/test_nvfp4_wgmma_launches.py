"""What is passed to the two kernels of a linear by warpgroup products, parameter by parameter; needs no GPU."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, get_ident
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from vtensors_kernels.compiling.sources import load_source
from vtensors_kernels.fp8.packed import Scales
from vtensors_kernels.nvfp4 import wgmma, wgmma_launches, wgmma_segments_form
from vtensors_kernels.nvfp4.packed import FORMAT, PackedNVFP4
from vtensors_kernels.nvfp4.wgmma_form import WgmmaForm

N, K, M = 40, 272, 5


def _parameters(source: str) -> list[str]:
    """Names of the kernel's parameters in order."""
    text = re.sub(r"//[^\n]*", "", load_source(source).text)
    head = re.search(r'extern "C" __global__.*?\)\s*\{', text, re.DOTALL)
    assert head is not None
    inside = head[0][head[0].rindex("(") + 1 : head[0].rindex(")")]
    return [part.split()[-1].lstrip("*") for part in inside.split(",")]


@attrs.define(kw_only=True)
class FakeLaunch:
    """Records what it is called with, by the name of the parameter."""

    function: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: int
    shared_bytes: int = 0
    dependent: bool = False
    seen: dict[str, int] = attrs.field(factory=dict)

    def call(self, stream: int, *arguments: int) -> None:
        """As `Launch.call`."""
        names = _parameters(self.function.source)
        assert self.dependent
        assert len(arguments) == len(names) == self.arguments
        self.seen = dict(zip(names, arguments, strict=True))


def _packed() -> PackedNVFP4:
    return PackedNVFP4(
        blocks=torch.zeros(3, 3, 1152, dtype=torch.uint8),
        row_scale=torch.zeros(48),
        shape=(N, K),
        bias=torch.zeros(48),
        pre_scale=torch.ones(K),
    )


FORMS = [
    (wgmma.LINEAR, WgmmaForm(tokens=64, warpgroups=2, cluster=1, blocks=2, chunk=4, slots=3)),
    *(
        (layout.segments[0], next(wgmma_segments_form.compiled_forms(32, layout.block_bytes)))
        for layout in (FORMAT, Scales.ROWS.format)
        if layout.segments
    ),
]


@pytest.mark.parametrize(("source", "form"), FORMS, ids=["wgmma", "segments", "fp8"])
def test_each_parameter_of_both_kernels_gets_what_its_name_says(
    source: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(source: str, name: str, index: int, defines: dict[str, int], shared: int = 0) -> Any:
        return SimpleNamespace(source=source, name=name, defines=defines)

    monkeypatch.setattr(wgmma_launches, "compiled_function", compiled)
    monkeypatch.setattr(wgmma_launches, "Launch", FakeLaunch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    packed, work = (
        _packed(),
        SimpleNamespace(
            staged=torch.zeros(8),
            partials=torch.zeros(8),
            counters=torch.zeros(8, dtype=torch.int32),
            turn=Lock(),
        ),
    )
    made: Any = wgmma_launches.make_launches(source, "name", form, packed, torch.bfloat16, 1)
    x, residual, out = (
        torch.randn(M, K).bfloat16(),
        torch.zeros(M, N).bfloat16(),
        torch.zeros(M, N).bfloat16(),
    )
    made.run(x, residual, out, work)
    assert made.permute.function.defines == {"VT_TOKENS": form.tokens, "VT_F16": 0}
    assert made.multiply.function.defines == {**form.defines, "VT_F16": 0, "VT_EPILOGUE": 1}
    assert (made.multiply.grid, made.multiply.block) == ((form.blocks, 1, 1), (form.threads, 1, 1))
    first, second = made.permute.seen, made.multiply.seen
    assert list(first.values()) == [
        x.data_ptr(),
        packed.pre_scale.data_ptr(),
        work.staged.data_ptr(),
        K,
        M,
        K,
        3,
    ]
    assert first["x"] == x.data_ptr()
    assert first["tokens"] == M
    assert list(second.values()) == [
        packed.blocks.data_ptr(),
        work.staged.data_ptr(),
        packed.row_scale.data_ptr(),
        packed.bias.data_ptr(),
        residual.data_ptr(),
        out.data_ptr(),
        work.partials.data_ptr(),
        work.counters.data_ptr(),
        N,
        3,
        M,
    ]
    assert (second["blocks"], second["row_scale"], second["n"]) == (
        packed.blocks.data_ptr(),
        packed.row_scale.data_ptr(),
        N,
    )
    assert (second["y"], second["tokens"]) == (out.data_ptr(), M)


def test_threads_on_one_stream_take_turns_with_the_shared_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def launch(which: str) -> Any:
        def call(_stream: int, *_: int) -> None:
            order.append((which, get_ident()))
            time.sleep(0.001)

        return SimpleNamespace(call=call)

    monkeypatch.setattr(wgmma_launches, "current_stream", lambda device: 7)
    work: Any = SimpleNamespace(
        staged=torch.zeros(8),
        partials=torch.zeros(8),
        counters=torch.zeros(8, dtype=torch.int32),
        turn=Lock(),
    )
    both = wgmma_launches.WgmmaLaunches(packed=_packed(), permute=launch("x"), multiply=launch("y"))
    x, out = torch.randn(M, K).bfloat16(), torch.zeros(M, N).bfloat16()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(both.run, x, None, out, work) for _ in range(12)]:
            done.result()
    assert all(a == ("x", b[1]) and b[0] == "y" for a, b in zip(order[::2], order[1::2], strict=True))
