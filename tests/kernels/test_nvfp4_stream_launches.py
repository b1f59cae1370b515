"""What `StreamLinear` and `StreamArgmax` launch, without a driver: arguments by name, grids, several launches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from vtensors.errors import RequestError
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.compiling.functions import Wanted
from vtensors_kernels.compiling.launch import float_bits
from vtensors_kernels.compiling.sources import load_source
from vtensors_kernels.nvfp4 import stream, stream_launches
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.stream import StreamArgmax, StreamLinear
from vtensors_kernels.nvfp4.stream_form import shared_limit
from vtensors_kernels.reference.nvfp4_packing import pack_reference

BF16 = torch.bfloat16
Launched = list[dict[str, Any]]


def _parameters() -> list[str]:
    """The names of the kernel's parameters, in order."""
    text = load_source(stream_launches.SOURCE).text
    head = text[text.index("VT_FUNCTION(") :].partition("{")[0]
    return re.findall(r"(\w+)[,)]", re.sub(r"//.*", "", head))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Every launch of a Hopper device with 132 multiprocessors: arguments by name, launch and macros."""
    found: Launched = []
    names = _parameters()

    @attrs.define(kw_only=True)
    class Launch:
        function: Any
        grid: tuple[int, int, int]
        block: tuple[int, int, int]
        arguments: int
        constants: dict[int, int]
        shared_bytes: int
        dependent: bool

        def call(self, _stream: int, *arguments: int) -> None:
            assert len(arguments) + len(self.constants) == len(names) == self.arguments
            given = iter(arguments)
            values = (self.constants[i] if i in self.constants else next(given) for i in range(len(names)))
            found.append(dict(zip(names, values, strict=True)) | {"launch": self})

    def compile_many(wanted: Sequence[Wanted], _index: int) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(target="sm_90a", wanted=one) for one in wanted)

    picked = SimpleNamespace(shapes=[])
    monkeypatch.setattr(stream_launches, "Launch", Launch)
    monkeypatch.setattr(stream_launches, "compile_many", compile_many)
    monkeypatch.setattr(stream_launches, "max_active_clusters", lambda *_: 29)
    monkeypatch.setattr(stream_launches, "_require", lambda packed, variant: None)
    monkeypatch.setattr(
        stream, "LargestPicker", lambda *_: lambda keys, ids: picked.shapes.append((keys.shape, ids.shape))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    current = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device=None: nullcontext())
    return found


def _packed(n: int, k: int, *, paired: bool = False) -> PackedNVFP4:
    weight = quantize_nvfp4(torch.randn(n, k))
    return pack_reference([weight, weight] if paired else [weight], paired=paired)


def _macros(launch: Any) -> dict[str, int]:
    return dict(launch.function.wanted.defines)


def test_the_parameters_are_those_that_the_launcher_knows() -> None:
    assert _parameters() == [
        *("blocks", "x", "out", "row_scale", "bias", "residual", "gain", "keys", "eps"),
        *("m", "n", "k", "stages", "stage_blocks", "slots"),
    ]


def test_a_plain_call_is_one_launch_of_the_chosen_form(launched: Launched) -> None:
    packed = _packed(333, 272)
    call = StreamLinear(packed, BF16)
    x = torch.randn(5, 272).to(BF16)
    y = call(x)
    (seen,) = launched
    launch, form = seen.pop("launch"), call.forms[4]
    assert y.shape == (5, 333)
    assert seen == {
        "blocks": packed.blocks.data_ptr(),
        "x": x.data_ptr(),
        "out": y.data_ptr(),
        "row_scale": packed.row_scale.data_ptr(),
        "bias": 0,
        "residual": 0,
        "gain": 0,
        "keys": 0,
        "eps": 0,
        "m": 5,
        "n": 333,
        "k": 272,
        "stages": form.stages,
        "stage_blocks": form.stage_blocks,
        "slots": form.slots,
    }
    assert (launch.grid, launch.block) == ((form.grid, 1, 1), (form.threads, 1, 1))
    assert (launch.shared_bytes, launch.dependent) == (form.shared_bytes, True)
    assert launch.function.wanted.shared_bytes == shared_limit("sm_90a", form.blocks_per_sm)
    assert _macros(launch) == {**form.defines, "VT_F16": 0, "VT_EPILOGUE": 0, "VT_PROLOGUE": 0}


def test_each_number_of_tokens_has_a_launch_of_its_own_made_once(launched: Launched) -> None:
    call = StreamLinear(_packed(40, 256), BF16)
    for _ in range(2):
        for m in range(1, 33):
            call(torch.randn(m, 256).to(BF16))
    launches = [seen["launch"] for seen in launched]
    assert launches[:32] == launches[32:]
    assert len({id(launch) for launch in launches}) == 32
    assert [seen["m"] for seen in launched] == [*range(1, 33)] * 2


def test_large_clusters_are_as_many_as_the_device_holds(launched: Launched) -> None:
    call = StreamLinear(_packed(1040, 5120), BF16)
    call(torch.randn(32, 5120).to(BF16))
    call(torch.randn(8, 5120).to(BF16))
    wide, narrow = (seen["launch"] for seen in launched)
    assert call.forms[31].cluster > 2
    assert wide.grid == (29 * call.forms[31].cluster, 1, 1)
    assert narrow.grid == (call.forms[7].grid, 1, 1)


def test_variants_bring_their_pointers_and_macros(launched: Launched) -> None:
    x, residual, gain = torch.randn(3, 256).to(BF16), torch.randn(3, 40).to(BF16), torch.rand(256)
    packed = _packed(40, 256)
    scaled = attrs.evolve(packed, pre_scale=torch.rand(256), bias=torch.zeros(48))
    StreamLinear(packed, BF16, "linear_add")(x, residual)
    StreamLinear(packed, BF16, "linear", "norm")(x, None, gain, 1e-6)
    StreamLinear(scaled, torch.float16)(x.half())
    y = StreamLinear(_packed(20, 256, paired=True), BF16, "linear_swiglu")(x)
    assert y.shape == (3, 20)
    add, norm, pre_scale, swiglu = launched
    variants = [
        (_macros(seen["launch"])["VT_EPILOGUE"], _macros(seen["launch"])["VT_PROLOGUE"]) for seen in launched
    ]
    assert variants == [(1, 0), (0, 2), (0, 1), (2, 0)]
    assert add["residual"] == residual.data_ptr()
    assert (norm["gain"], norm["eps"]) == (gain.data_ptr(), float_bits(1e-6))
    assert scaled.pre_scale is not None
    assert scaled.bias is not None
    assert (pre_scale["gain"], pre_scale["bias"]) == (scaled.pre_scale.data_ptr(), scaled.bias.data_ptr())
    assert _macros(pre_scale["launch"])["VT_F16"] == 1
    assert swiglu["n"] == 40


def test_tokens_that_do_not_fit_at_once_take_several_launches(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_launches, "serves", lambda k, target, block_bytes: 13)
    call = StreamLinear(_packed(40, 256), BF16, "linear_add")
    x, residual = torch.randn(32, 256).to(BF16), torch.randn(32, 40).to(BF16)
    y = call(x, residual)
    assert [seen["m"] for seen in launched] == [13, 13, 6]
    assert [(seen["x"] - x.data_ptr()) // 512 for seen in launched] == [0, 13, 26]
    assert [(seen["out"] - y.data_ptr()) // 80 for seen in launched] == [0, 13, 26]
    assert [(seen["residual"] - residual.data_ptr()) // 80 for seen in launched] == [0, 13, 26]


def test_an_argmax_has_a_key_for_every_reducer(launched: Launched) -> None:
    call = StreamArgmax(_packed(400, 256), BF16)
    assert call(torch.randn(5, 256).to(BF16)).shape == (5,)
    (seen,) = launched
    keys = call.empty_keys(5)
    assert keys.shape == (5, seen["launch"].grid[0] * _macros(seen["launch"])["VT_REDUCERS"])
    assert (seen["out"], seen["keys"] != 0) == (0, True)
    assert _macros(seen["launch"])["VT_EPILOGUE"] == 3


def test_what_does_not_fit_is_refused_before_a_launch(launched: Launched) -> None:
    packed = _packed(40, 256)
    x = torch.randn(3, 256).to(BF16)
    call, norm = StreamLinear(packed, BF16), StreamLinear(packed, BF16, "linear", "norm")
    for bad in (x.half(), x[:, :128], x[None]):
        with pytest.raises(RequestError, match="does not fit the weight"):
            call(bad)
    for missing in (lambda: norm(x), lambda: call(x, None, torch.rand(256))):
        with pytest.raises(RequestError, match="a gain goes with a norm"):
            missing()
    with pytest.raises(RequestError, match="the gain does not fit"):
        norm(x, None, torch.rand(128), 1e-6)
    with pytest.raises(RequestError, match="a residual goes with linear_add"):
        call(x, x)
    with pytest.raises(RequestError, match="at most 32"):
        call(torch.randn(33, 256).to(BF16))
    with pytest.raises(RequestError, match="rounds twice"):
        StreamLinear(attrs.evolve(packed, pre_scale=torch.rand(256)), BF16, "linear", "norm")
    assert call(x[:0]).shape == (0, 40)
    assert launched == []
