"""Calls of `linear_nvfp4_stream` on a CUDA device: chains, graphs, several launches, refusals, self-tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nvfp4_cuda_cases import make_weight, make_x, poisoned, relative, replayed
from nvfp4_stream_cases import EPS, check, stream_linear
from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_kernels.reference.linear import linear

pytestmark = pytest.mark.gpu


def test_more_columns_than_fit_at_once_take_several_launches() -> None:
    weight, x = make_weight(72, 40000), make_x(32, 40000, torch.bfloat16)
    residual = make_x(32, 72, torch.bfloat16, seed=1)
    call, add = stream_linear(weight, x.dtype), stream_linear(weight, x.dtype, "linear_add")
    whole = call(x, out=poisoned(32, 72, dtype=x.dtype))
    check(whole, linear(x.float(), weight), x.dtype)
    assert torch.equal(torch.cat([call(x[i : i + 1]) for i in range(32)]), whole)
    check(add(x, residual), linear(x.float(), weight) + residual.float(), x.dtype)
    assert len(call.forms) < 32


@pytest.mark.parametrize("m", [1, 5, 32])
def test_calls_in_a_chain_of_dependent_launches_see_each_others_results(m: int) -> None:
    sizes = [2048, 640, 5120, 1024, 2048]
    calls = [stream_linear(make_weight(n, k, seed=n), torch.bfloat16) for k, n in pairwise(sizes)]
    x = make_x(m, 2048, torch.bfloat16)

    def chain() -> Tensor:
        y = x
        for _ in range(3):
            for call in calls:
                y = call(y)
            y = y / y.float().norm().clamp(min=1e-3).to(y.dtype)
        return y

    y = x
    for _ in range(3):
        for call in calls:
            y = call(y)
            torch.cuda.synchronize()
        y = y / y.float().norm().clamp(min=1e-3).to(y.dtype)
    assert y.isfinite().all()
    assert bool(y.any())
    for found in replayed(chain):
        assert torch.equal(found, y)


@pytest.mark.parametrize("m", [1, 8, 16, 32])
@pytest.mark.parametrize("kind", ["linear", "linear_add", "linear_swiglu", "norm", "argmax"])
def test_a_hundred_replays_agree(kind: str, m: int) -> None:
    from vtensors_kernels.nvfp4.repack import pack
    from vtensors_kernels.nvfp4.stream import StreamArgmax

    weight, x = make_weight(5120, 2048, per_row=True), make_x(m, 2048, torch.bfloat16)
    residual, gain = make_x(m, 5120, x.dtype, seed=1), torch.rand(2048).cuda()
    plain, add = stream_linear(weight, x.dtype), stream_linear(weight, x.dtype, "linear_add")
    both = stream_linear([weight, make_weight(5120, 2048, seed=1)], x.dtype, "linear_swiglu")
    normed, pick = stream_linear(weight, x.dtype, norm=True), StreamArgmax(pack([weight]), x.dtype)
    calls: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: plain(x),
        "linear_add": lambda: add(x, residual),
        "linear_swiglu": lambda: both(x),
        "norm": lambda: normed(x, None, gain, EPS),
        "argmax": lambda: pick(x),
    }
    first, last = replayed(calls[kind])
    assert torch.equal(first, last)
    assert torch.equal(first, calls[kind]())


@pytest.mark.parametrize("m", [1, 7, 16, 32])
def test_a_first_call_may_be_captured(m: int) -> None:
    weight, x = make_weight(640, 2048), make_x(m, 2048, torch.bfloat16)
    call = stream_linear(weight, x.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x)
    graph.replay()
    assert torch.equal(y, call(x))


def test_x_may_be_strided_and_what_does_not_fit_is_refused() -> None:
    from vtensors_kernels.nvfp4.repack import pack
    from vtensors_kernels.nvfp4.stream import StreamLinear

    weight, wide = make_weight(64, 256), make_x(32, 512, torch.bfloat16)
    call, add = stream_linear(weight, torch.bfloat16), stream_linear(weight, torch.bfloat16, "linear_add")
    for x in (
        wide[:, 256:],
        wide[:, 1:257],
        wide.T[:256].T[:9],
        wide.reshape(-1)[3:515].view(2, 256),
    ):
        assert torch.equal(call(x), call(x.contiguous().clone()))
    assert call(wide[:0, :256]).shape == (0, 64)
    with pytest.raises(RequestError, match="at most 32"):
        call(make_x(33, 256, torch.bfloat16))
    for bad in (wide, wide[:, :256].half(), wide[:, :256].cpu()):
        with pytest.raises(RequestError, match="does not fit"):
            call(bad)
    with pytest.raises(RequestError, match="residual"):
        call(wide[:, :256], wide[:, :64])
    with pytest.raises(RequestError, match="residual"):
        add(wide[:, :256])
    with pytest.raises(RequestError, match="packed for another op"):
        StreamLinear(pack([weight]), torch.bfloat16, "linear_swiglu")


def test_a_call_allocates_its_output_and_costs_the_host_a_few_microseconds() -> None:
    call, x = stream_linear(make_weight(64, 256), torch.bfloat16), make_x(1, 256, torch.bfloat16)
    call(x)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call(x)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(300):
            call(x)
        best = min(best, (time.perf_counter() - begin) / 300)
    print(f"host time per call, output included: {best * 1e6:.2f} us")
    assert best < 20e-6


@pytest.mark.fault("B83")
@pytest.mark.parametrize(
    ("op", "shape", "parts", "traits"),
    [
        ("linear", (5120, 6144), (5120,), ()),
        ("linear", (248320, 5120), (248320,), ("bias",)),
        ("linears", (14336, 5120), (12288, 1024, 1024), ("row_scale",)),
        ("linear_add", (5120, 17408), (5120,), ("pre_scale",)),
        ("linear_swiglu", (34816, 5120), (17408, 17408), ("row_scale", "bias")),
        ("norm_linears", (16384, 5120), (10240, 6144), ("row_scale",)),
        ("norm_linear_swiglu", (1024, 2048), (512, 512), ("row_scale",)),
        ("linear_argmax", (248320, 5120), (248320,), ()),
        ("linear", (128, 128), (128,), ("group32",)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_self_test_passes(
    op: str, shape: tuple[int, int], parts: tuple[int, ...], traits: tuple[str, ...], dtype: str
) -> None:
    from vtensors_kernels.nvfp4.stream_probe import fingerprint_stream, probe_stream

    request = KernelRequest(
        op=op,
        scheme="nvfp4",
        activations="16bit",
        device="cuda:0",
        capability=torch.cuda.get_device_capability(),
        dtype=dtype,
        shape=shape,
        parts=parts,
        tokens=(1, 32),
        traits=frozenset(traits),
    )
    begin = time.perf_counter()
    probe_stream(request)
    print(f"{op} {shape} {dtype}: {time.perf_counter() - begin:.2f} s")
    assert fingerprint_stream(request) == fingerprint_stream(request)


@pytest.mark.fault("B83")
def test_a_wrong_result_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensors_kernels.nvfp4 import stream_probe

    request = KernelRequest(
        op="linear", scheme="nvfp4", activations="16bit", device="cuda:0",
        capability=torch.cuda.get_device_capability(), dtype="bfloat16", shape=(640, 1024), parts=(640,),
        tokens=(1, 32),
    )  # fmt: skip
    real = stream_probe.reference
    monkeypatch.setattr(stream_probe, "reference", lambda x, weight: real(x, weight).roll(1, -1))
    with pytest.raises(VtensorsError, match="relative error"):
        stream_probe.probe_stream(request)


def test_relative_error_of_a_large_shape_is_that_of_the_rounding() -> None:
    weight, x = make_weight(5120, 5120), make_x(32, 5120, torch.bfloat16)
    assert relative(stream_linear(weight, x.dtype)(x), linear(x.float(), weight)) < 2e-3
