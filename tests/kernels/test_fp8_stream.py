"""`linear_fp8_stream` without a device: its forms, what is launched, what is compiled, and why a request is refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fp8_cases import KINDS, make_fp8
from vtensors.errors import RequestError
from vtensors.records import KernelRequest
from vtensors_kernels.compiling.architectures import COMPILED, PORTABLE, RUN
from vtensors_kernels.compiling.functions import Wanted
from vtensors_kernels.fp8.packed import SCALES_OF, Scales
from vtensors_kernels.fp8.stream import INSTANTIATIONS
from vtensors_kernels.nvfp4 import stream_launches
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.stream_form import choose_form, defines_of, rules_of, serves, shared_limit
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference
from vtensors_plugins.backends.cuda_fp8 import fp8_kernels

SHAPES = [
    *((34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (248320, 5120)),
    *((12288, 2048), (2048, 4096), (1024, 2048), (2048, 512), (1, 16), (40, 144), (8192, 28672)),
]


@pytest.mark.parametrize("scales", Scales)
@pytest.mark.parametrize("target", [*COMPILED, PORTABLE])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_shape_has_a_form_whose_rings_hold_its_blocks(
    n: int, k: int, target: str, scales: Scales
) -> None:
    size = scales.block_bytes
    assert serves(k, target, size) <= serves(k, target)
    assert serves(k, target, size) >= (32 if target == "sm_90a" and k <= 17408 else 1)
    for m in range(1, serves(k, target, size) + 1):
        form = choose_form(n, k, m, 132, target, size)
        # One that is to be alone on an SM takes more than half of it, and has a block for each SM at most.
        alone = form.shared_bytes > shared_limit(target, 2)
        assert form.shared_bytes <= shared_limit(target, 1 if alone else form.blocks_per_sm)
        assert form.grid <= 132 or not alone
        assert form.ring_bytes == form.warps * form.stages * form.stage_blocks * form.row_tiles * size
        # Besides the rings: x, sums and barriers, as `Layout` has them; those do not depend on the format.
        same = attrs.evolve(form, block_bytes=BLOCK_BYTES)
        steps = -(-k // 128)
        x = m * (-(-steps * (8 // form.cluster) // 8) * 256 + 32)
        assert form.shared_bytes - form.ring_bytes > x
        assert same.ring_bytes < form.ring_bytes
        assert defines_of(form) in [defines_of(rule) for rule in rules_of(target)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_launches_the_kernel_of_its_scales(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

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
            given, constants = iter(arguments), self.constants
            values = (constants[i] if i in constants else next(given) for i in range(self.arguments))
            found.append((self, tuple(values)))

    def compile_many(wanted: Sequence[Wanted], _index: int) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(target="sm_90a", wanted=one) for one in wanted)

    monkeypatch.setattr(stream_launches, "Launch", Launch)
    monkeypatch.setattr(stream_launches, "compile_many", compile_many)
    monkeypatch.setattr(stream_launches, "max_active_clusters", lambda *_: 29)
    monkeypatch.setattr(stream_launches, "_require", lambda packed, variant: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    current = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device=None: nullcontext())

    packed = pack_fp8_reference([make_fp8(kind, 334, 1056)])
    call = StreamLinear(packed, torch.bfloat16)
    call(torch.randn(5, 1056).to(torch.bfloat16))
    ((launch, arguments),) = found
    call(torch.randn(64, 1056).to(torch.bfloat16))
    assert [arguments[9] for _, arguments in found[1:]] == [32, 32]
    with pytest.raises(RequestError, match="at most 64"):
        call(torch.randn(65, 1056).to(torch.bfloat16))
    form = call.forms[4]
    assert form.block_bytes == packed.blocks.shape[2] == packed.scales.block_bytes
    assert arguments[0] == packed.blocks.data_ptr()
    assert arguments[3] == packed.row_scale.data_ptr()
    assert arguments[9:] == (5, 334, 1056, form.stages, form.stage_blocks, form.slots)
    assert launch.function.wanted.source == "common/linear_fp8_stream.cu"
    assert launch.function.wanted.name == "linear_fp8_stream"
    macros = dict(launch.function.wanted.defines)
    assert macros["VT_SCALES"] == packed.scales.value
    assert {name: macros[name] for name in form.defines} == form.defines


def test_every_form_of_a_device_is_compiled_for_every_kind_of_scales() -> None:
    compiled = {
        (target, tuple(sorted(one.defines.items()))) for one in INSTANTIATIONS for target in one.targets
    }
    for target in COMPILED:
        for rule in rules_of(target):
            for scales in Scales:
                for f16 in (0, 1) if target in RUN or scales is Scales.ROWS else (0,):
                    macros = {
                        **stream_launches.stream_defines(rule, f16),
                        "VT_SCALES": scales.value,
                    }
                    assert (target, tuple(sorted(macros.items()))) in compiled


def _request(scheme: str = "fp8-row", **changes: Any) -> KernelRequest:
    plain = KernelRequest(
        op="linear",
        scheme=scheme,
        activations="16bit",
        device="cuda:0",
        capability=(9, 0),
        dtype="bfloat16",
        shape=(5120, 6144),
        parts=(5120,),
        tokens=(1, 32),
        assumed=True,
    )
    return attrs.evolve(plain, **changes)


REFUSED: dict[str, tuple[KernelRequest, str]] = {
    "activations": (_request(activations="fp8-dynamic"), "16-bit activations"),
    "dtype": (_request(dtype="float32"), "computes in bfloat16"),
    "columns": (_request(shape=(64, 40), parts=(64,)), "K to be a multiple of 16, not 40"),
    "block": (_request("fp8-block", traits=frozenset({"block64x64"})), "not of 64 x 64"),
    "parts": (_request("fp8-block", op="linears", shape=(86, 128), parts=(43, 43)), "multiple of 4 rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_why(case: str) -> None:
    request, reason = REFUSED[case]
    for kernel in fp8_kernels():
        if kernel.op == request.op:
            assert reason in str(kernel.refuse(request))


def test_what_can_be_packed_is_not_refused() -> None:
    requests = [
        *(_request(scheme) for scheme in SCALES_OF),
        _request("fp8-block", traits=frozenset({"block256x128"})),
        _request("fp8-block", op="linears", shape=(87, 128), parts=(44, 43)),
        _request("fp8-block", op="linear_swiglu", shape=(86, 128), parts=(43, 43)),
    ]
    for request in requests:
        for kernel in fp8_kernels():
            if kernel.op == request.op:
                assert kernel.refuse(request) is None


@pytest.mark.parametrize("scheme", SCALES_OF)
def test_a_few_tokens_are_streamed_and_many_widened(scheme: str) -> None:
    kernels = {kernel.name: kernel for kernel in fp8_kernels() if kernel.op == "linear"}

    def cost(name: str, m: int) -> float:
        model = kernels[name].cost
        assert callable(model)
        return model(_request(scheme, tokens=(m, m)))

    for m in (1, 8, 16, 32):
        assert cost("linear_fp8_stream", m) < cost("linear_fp8_packed_widening", m)
    assert cost("linear_fp8_stream", 32) < cost("linear_fp8_stream_in_parts", 33)
    assert cost("linear_fp8_stream_in_parts", 33) < cost("linear_fp8_packed_widening", 33)
    assert cost("linear_fp8_packed_widening", 65) < 1e3
