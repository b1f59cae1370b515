"""What is passed to the kernels of a linear by warpgroup products, parameter by parameter; needs no GPU."""

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

from vtensors_kernels.compiling.launch import float_bits
from vtensors_kernels.compiling.sources import load_source
from vtensors_kernels.fp8.packed import Scales
from vtensors_kernels.nvfp4 import staging, wgmma, wgmma_launches, wgmma_segments_form
from vtensors_kernels.nvfp4.packed import FORMAT, PackedNVFP4
from vtensors_kernels.nvfp4.staging import Norm
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


@pytest.fixture
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are recorded, and nothing is compiled."""

    def compiled(source: str, name: str, index: int, defines: dict[str, int], shared: int = 0) -> Any:
        return SimpleNamespace(source=source, name=name, defines=defines)

    for module in (staging, wgmma_launches):
        monkeypatch.setattr(module, "compiled_function", compiled)
        monkeypatch.setattr(module, "Launch", FakeLaunch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))


def _workspace() -> Any:
    counters = torch.zeros(8, dtype=torch.int32)
    return SimpleNamespace(staged=torch.zeros(8), partials=torch.zeros(8), counters=counters, turn=Lock())


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize(("source", "form"), FORMS, ids=["wgmma", "segments", "fp8"])
def test_each_parameter_of_both_kernels_gets_what_its_name_says(source: str, form: Any) -> None:
    packed, work = _packed(), _workspace()
    made: Any = wgmma_launches.make_launches(source, "name", form, packed, torch.bfloat16, 1)
    x, residual, out = (
        torch.randn(M, K).bfloat16(),
        torch.zeros(M, N).bfloat16(),
        torch.zeros(M, N).bfloat16(),
    )
    made.run(x, residual, out, work)
    assert made.staging.permute.function.defines == {"VT_PRE_SCALE": 1, "VT_F16": 0}
    assert made.multiply.function.defines == {**form.defines, "VT_F16": 0, "VT_EPILOGUE": 1}
    assert (made.multiply.grid, made.multiply.block) == ((form.blocks, 1, 1), (form.threads, 1, 1))
    assert made.staging.permute.seen == {
        "x": x.data_ptr(),
        "pre_scale": packed.pre_scale.data_ptr(),
        "staged": work.staged.data_ptr(),
        "row_stride": K,
        "tokens": M,
        "columns": K,
        "pitch": form.tokens,
    }
    second = made.multiply.seen
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


@pytest.mark.usefixtures("_recorded")
def test_each_parameter_of_the_norm_gets_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_why_not", lambda columns, dtype, device: None)
    (source, form), packed, work = FORMS[1], _packed(), _workspace()
    made: Any = wgmma_launches.make_launches(source, "name", form, packed, torch.bfloat16, 0)
    x, out, gain = torch.randn(M, K).bfloat16(), torch.zeros(M, N).bfloat16(), torch.ones(K)
    made.run(x, None, out, work, Norm(gain=gain, eps=1e-5))
    assert made.staging.norm.seen == {
        "x": x.data_ptr(),
        "gain": gain.data_ptr(),
        "pre_scale": packed.pre_scale.data_ptr(),
        "staged": work.staged.data_ptr(),
        "row_stride": K,
        "tokens": M,
        "columns": K,
        "pitch": form.tokens,
        "eps": float_bits(1e-5),
    }
    assert made.staging.norm.grid == (form.tokens, 1, 1)
    assert not made.staging.permute.seen
    assert made.multiply.seen["staged"] == work.staged.data_ptr()


@pytest.mark.usefixtures("_recorded")
def test_a_norm_that_no_one_launch_computes_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_why_not", lambda columns, dtype, device: "it failed its self-test")
    x, gain, normed = torch.randn(M, K).bfloat16(), torch.ones(K), torch.randn(M, K).bfloat16()
    monkeypatch.setattr(wgmma_launches, "norm_rows", lambda *given: normed if given == (x, gain, 1e-5) else x)
    (source, form), work = FORMS[1], _workspace()
    made: Any = wgmma_launches.make_launches(source, "name", form, _packed(), torch.bfloat16, 0)
    made.run(x, None, torch.zeros(M, N).bfloat16(), work, Norm(gain=gain, eps=1e-5))
    assert not made.staging.norm.seen
    assert made.staging.permute.seen["x"] == normed.data_ptr()


def test_threads_on_one_stream_take_turns_with_the_shared_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def launch(which: str) -> Any:
        def call(_stream: int, *_: int) -> None:
            order.append((which, get_ident()))
            time.sleep(0.001)

        return SimpleNamespace(call=call)

    monkeypatch.setattr(wgmma_launches, "current_stream", lambda device: 7)
    work, permute = _workspace(), launch("x")
    laid_out = staging.Staging(columns=K, tokens=8, pre_scale=None, permute=permute, norm=None)
    both = wgmma_launches.WgmmaLaunches(packed=_packed(), staging=laid_out, multiply=launch("y"))
    x, out = torch.randn(M, K).bfloat16(), torch.zeros(M, N).bfloat16()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(both.run, x, None, out, work) for _ in range(12)]:
            done.result()
    assert all(a == ("x", b[1]) and b[0] == "y" for a, b in zip(order[::2], order[1::2], strict=True))
