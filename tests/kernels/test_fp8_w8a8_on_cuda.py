"""FP8 activations on a CUDA device: quantizers bit for bit, linears by FP8 tensor cores and emulated, self-tests."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from fp8_cases import make_fp8
from nvfp4_cuda_cases import HALVES, make_weight, poisoned, relative, replayed
from nvfp4_stream_cases import check
from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import e4m3, e8m0
from vtensors_formats.activations import ActivationQuantizer, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_kernels.reference.swiglu import swiglu

pytestmark = pytest.mark.gpu
STATIC, TOKEN, GROUP = (
    FP8StaticActivation(scale=torch.tensor(0.009)),
    FP8TokenActivation(),
    FP8GroupActivation(),
)
QUANTIZERS = {
    "static": STATIC,
    "token": TOKEN,
    "group": GROUP,
    **{f"mx-{rule.value}": MXFP8Activation(rule=rule) for rule in e8m0.ExponentRule},
}
NATIVE = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8 tensor cores"
)
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="sm_90 alone"
)


def x_of(m: int, k: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    rows = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    return (rows * torch.linspace(0.3, 1.6, m).unsqueeze(1)).to(dtype).cuda()


def weight_of(kind: str, n: int, k: int, activation: ActivationQuantizer, *, seed: int = 0) -> Any:
    return attrs.evolve(make_fp8(kind, n, k, seed=seed), activation=activation).to("cuda")


def reference(x: Tensor, weight: Any) -> Tensor:
    from vtensors_kernels.activation_quantizers.probes import reference as of

    return of(x, weight, weight.activation)


def same(ours: Tensor, wanted: Tensor) -> bool:
    """Bit for bit, any NaN being one."""
    nan = wanted.isnan()
    plain = torch.int16 if ours.element_size() == 2 else torch.int32
    return torch.equal(ours.isnan(), nan) and torch.equal(ours[~nan].view(plain), wanted[~nan].view(plain))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("k", [16, 336, 1024, 24592])
def test_codes_and_scales_are_the_references_at_every_number(name: str, k: int, dtype: torch.dtype) -> None:
    from vtensors_kernels.activation_quantizers.fp8 import FP8Quantizer, Scaling, Written

    activation = QUANTIZERS[name].to("cuda")
    bits = torch.arange(65536, dtype=torch.int32) * 40503 % 65536
    every = bits.to(torch.uint16).view(torch.int16).view(dtype)
    every = every[: 65536 // k * k].reshape(-1, k)
    # Rows of finite numbers beside those with NaN and infinity, and one of zeros.
    finite = torch.where(every.isfinite(), every, torch.zeros((), dtype=dtype))
    x = torch.cat([every, finite, torch.zeros(1, k, dtype=dtype), x_of(3, k, dtype).cpu()]).cuda()
    wanted = activation.codes(x)
    quantizer = FP8Quantizer(activation, k, dtype, x.device)
    quantized = quantizer(x)
    assert same(e4m3.decode(quantized.rows), e4m3.decode(wanted.codes))
    assert torch.equal(
        quantized.rows.view(torch.uint8)[~e4m3.decode(wanted.codes).isnan()],
        wanted.codes.view(torch.uint8)[~e4m3.decode(wanted.codes).isnan()],
    )
    if quantized.scale is not None:
        if quantized.scale.dtype == torch.uint8:
            assert torch.equal(quantized.scale, wanted.scale)
        else:
            assert same(quantized.scale, wanted.scale.reshape(quantized.scale.shape))
    kept = quantizer.scaling in (Scaling.STORED, Scaling.TOKEN)
    rows = FP8Quantizer(activation, k, dtype, x.device, Written.VALUES if kept else Written.ROUNDED)(x).rows
    assert same(rows, e4m3.decode(wanted.codes).to(dtype) if kept else activation(x))
    # A row by itself, and as part of a wider matrix.
    wide = torch.full((len(x), k + 16), float("nan"), dtype=dtype, device="cuda")
    wide[:, 8 : k + 8] = x
    apart = quantizer(wide[:, 8 : k + 8])
    assert torch.equal(apart.rows.view(torch.uint8), quantized.rows.view(torch.uint8))
    alone = quantizer(x[-1:])
    assert torch.equal(alone.rows.view(torch.uint8), quantized.rows[-1:].view(torch.uint8))


@NATIVE
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("epilogue", ["linear", "linear_add", "linear_swiglu"])
@pytest.mark.parametrize("activation", [STATIC, TOKEN], ids=["static", "token"])
@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize(("n", "k"), [(16, 16), (48, 304), (1040, 1024), (2048, 5120)])
def test_fp8_tensor_cores_agree_with_the_reference(
    n: int, k: int, kind: str, activation: ActivationQuantizer, epilogue: str, dtype: torch.dtype
) -> None:
    from vtensors_kernels.fp8.stacked import stack_fp8
    from vtensors_kernels.fp8.w8a8 import W8A8Linear

    parts = [weight_of(kind, n, k, activation, seed=i) for i in range(2)]
    parts = [attrs.evolve(part, bias=torch.randn(n).cuda()) for part in parts] if n == 48 else parts
    call = W8A8Linear(stack_fp8(parts, paired=epilogue == "linear_swiglu"), dtype, epilogue)
    for m in (1, 5, 16, 33, 64, 130):
        x = x_of(m, k, dtype)
        sums = [reference(x, part) for part in parts]
        residual = x_of(m, 2 * n, dtype, seed=1) if epilogue == "linear_add" else None
        wanted = swiglu(*sums) if epilogue == "linear_swiglu" else torch.cat(sums, dim=-1)
        wanted = wanted if residual is None else wanted + residual.float()
        into = poisoned(*wanted.shape, dtype=dtype)
        check(call(x, residual, into), wanted, dtype, roundings=2 if epilogue == "linear_swiglu" else 1)
        assert not into.isnan().any()


@NATIVE
def test_what_fast_accumulation_costs_in_accuracy_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from vtensors_kernels.fp8.stacked import stack_fp8
    from vtensors_kernels.fp8.w8a8 import W8A8Linear

    weight, x = weight_of("row", 1024, 17408, TOKEN), x_of(16, 17408, torch.bfloat16)
    wanted, stacked = reference(x, weight), stack_fp8([weight])
    errors = {fast: relative(W8A8Linear(stacked, x.dtype, fast=fast)(x), wanted) for fast in (False, True)}
    with capsys.disabled():
        print(
            f"\nW8A8, K = 17408: relative error {errors[False]:.2e}, with fast accumulation {errors[True]:.2e}"
        )
    assert errors[False] < 3e-3


@HOPPER
@pytest.mark.fault("B14")
@pytest.mark.parametrize("m", [1, 3, 4, 17, 128])
@pytest.mark.parametrize("residual", [False, True])
def test_blocks_and_groups_by_fp8_tensor_cores(residual: bool, m: int) -> None:
    from vtensors_kernels.fp8.stacked import stack_fp8
    from vtensors_kernels.fp8.w8a8 import W8A8Linear

    parts = [weight_of("block", 256, 2048, GROUP), weight_of("block", 144, 2048, GROUP, seed=1)]
    call = W8A8Linear(stack_fp8(parts), torch.bfloat16, "linear_add" if residual else "linear")
    x = x_of(m, 2048, torch.bfloat16)
    wanted = torch.cat([reference(x, part) for part in parts], dim=-1)
    added = x_of(m, 400, torch.bfloat16, seed=1) if residual else None
    check(call(x, added), wanted if added is None else wanted + added.float(), torch.bfloat16)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("epilogue", ["linear", "linear_add", "linear_swiglu"])
@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("tensor", STATIC),
        ("row", STATIC),
        ("row", TOKEN),
        ("block", GROUP),
        ("block", TOKEN),
        ("mx", MXFP8Activation()),
    ],
)
@pytest.mark.parametrize("k", [288, 5120])
def test_emulated_rows_are_the_references_and_the_same_bits_at_any_number(
    k: int, kind: str, activation: ActivationQuantizer, epilogue: str, dtype: torch.dtype
) -> None:
    from vtensors_kernels.activation_quantizers.linears import QuantizedInputMatrix, QuantizedStream
    from vtensors_kernels.fp8.repack import pack_fp8

    n = 44 if kind == "block" else 43
    parts = [weight_of(kind, n, k, activation, seed=i) for i in range(2)]
    packed = pack_fp8(parts, paired=epilogue == "linear_swiglu")
    matrix = QuantizedInputMatrix(packed=packed, activation=parts[0].activation)
    x = x_of(64, k, dtype)
    sums = [reference(x, part) for part in parts]
    residual = x_of(64, 2 * n, dtype, seed=1) if epilogue == "linear_add" else None
    wanted = swiglu(*sums) if epilogue == "linear_swiglu" else torch.cat(sums, dim=-1)
    wanted = wanted if residual is None else wanted + residual.float()
    roundings = (2 if kind in ("block", "mx") else 1) + (epilogue == "linear_swiglu")
    for rows in (34816, 640):
        call = QuantizedStream(matrix, dtype, epilogue, rows=rows)
        whole = call(x, residual, poisoned(*wanted.shape, dtype=dtype))
        check(whole, wanted, dtype, roundings=roundings)
        for m in (1, 2, 8, 9, 17, 32, 33):
            assert torch.equal(call(x[:m], None if residual is None else residual[:m]), whole[:m]), f"M = {m}"
        last = call(x[-3:], None if residual is None else residual[-3:])
        assert torch.equal(last, whole[-3:])


@pytest.mark.parametrize("activation", [STATIC, TOKEN], ids=["static", "token"])
@pytest.mark.parametrize("native", [pytest.param(True, marks=NATIVE), False])
def test_calls_are_captured_and_a_hundred_replays_agree(
    native: bool, activation: ActivationQuantizer
) -> None:
    from vtensors_kernels.activation_quantizers.linears import QuantizedInputMatrix, QuantizedStream
    from vtensors_kernels.fp8.repack import pack_fp8
    from vtensors_kernels.fp8.stacked import stack_fp8
    from vtensors_kernels.fp8.w8a8 import W8A8Linear

    weight, x = weight_of("row", 640, 2048, activation), x_of(7, 2048, torch.bfloat16)
    call: Any
    if native:
        call = W8A8Linear(stack_fp8([weight]), x.dtype)
    else:
        matrix = QuantizedInputMatrix(packed=pack_fp8([weight]), activation=weight.activation)
        call = QuantizedStream(matrix, x.dtype)
    first, last = replayed(lambda: call(x))
    assert torch.equal(first, last)
    check(last, reference(x, weight), x.dtype)


def request(op: str, scheme: str, activations: str, shape: tuple[int, int], *traits: str) -> KernelRequest:
    halves = op.endswith(("swiglu", "linears"))
    return KernelRequest(
        op=op,
        scheme=scheme,
        activations=activations,
        device="cuda:0",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        shape=shape,
        parts=(shape[0] // 2,) * 2 if halves else (shape[0],),
        traits=frozenset(traits),
    )


@pytest.mark.parametrize(
    ("op", "shape", "traits"),
    [
        ("linear", (5120, 6144), ("bias", "pre_scale")),
        ("norm_linears", (16384, 5120), ()),
        ("norm_linear_swiglu", (34816, 5120), ()),
        ("linear_add", (5120, 17408), ()),
        ("linear_argmax", (248320, 5120), ()),
    ],
)
@pytest.mark.parametrize(
    ("scheme", "activations"),
    [
        ("fp8-tensor", "fp8-static"),
        ("fp8-row", "fp8-dynamic"),
        ("fp8-block", "fp8-dynamic"),
        ("mxfp8", "fp8-dynamic"),
        ("nvfp4", "fp8-static"),
    ],
)
def test_the_self_tests_pass(
    scheme: str, activations: str, op: str, shape: tuple[int, int], traits: tuple[str, ...]
) -> None:
    from vtensors.kernel_targets import specificity
    from vtensors_plugins.backends.cuda_w8a8 import w8a8_kernels

    asked = request(op, scheme, activations, shape, *traits)
    tried = []
    for kernel in w8a8_kernels():
        own = attrs.evolve(asked, tokens=kernel.tokens)
        if kernel.op != op or scheme not in kernel.schemes or specificity(kernel.targets, own) is None:
            continue
        if kernel.refuse(own) is not None:
            continue
        assert kernel.probe is not None
        assert kernel.fingerprint is not None
        kernel.probe(own)
        assert kernel.fingerprint(own) == kernel.fingerprint(own)
        tried.append(kernel.name)
    assert any("emulated" in name for name in tried)


@pytest.mark.parametrize(
    ("scheme", "kind", "activation"),
    [
        ("fp8-tensor", "tensor", STATIC),
        ("fp8-row", "row", TOKEN),
        ("fp8-block", "block", GROUP),
        ("nvfp4", "", STATIC),
    ],
)
def test_a_layer_is_bound_as_declared_and_served_at_any_number_of_rows(
    scheme: str, kind: str, activation: ActivationQuantizer, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtensors.kernel_binding import bind_plan
    from vtensors.selection import plan_kernels
    from vtensors_plugins.backends import cuda
    from vtensors_plugins.backends import reference as plain

    if scheme == "nvfp4":
        weight: Any = attrs.evolve(make_weight(640, 1024), activation=activation.to("cuda"))
    else:
        weight = weight_of(kind, 640, 1024, activation)
    asked = request("linear", scheme, activation.kind, (640, 1024))
    plan = plan_kernels(asked, [*plain.vtensors_kernels(), *cuda.vtensors_kernels()])
    bound = bind_plan(plan, [weight])
    names = {segment.tokens: segment.kernel.name for segment in bound.segments}
    with capsys.disabled():
        print(f"\n{scheme} {activation.kind}: {names}; rejected {bound.rejected}")
    assert "linear_reference" not in names.values()
    for m in (1, 20, 50, 200):
        x = x_of(m, 1024, torch.bfloat16)
        check(bound.call(x), reference(x, weight), x.dtype, roundings=3)


@pytest.mark.fault("B102")
def test_a_wrong_scale_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensors_kernels.activation_quantizers import fp8
    from vtensors_plugins.backends.cuda_w8a8 import w8a8_kernels

    (kernel,) = [k for k in w8a8_kernels() if k.name == "linear_fp8_w8a8_emulated_stream"]
    asked = attrs.evolve(request("linear", "fp8-row", "fp8-dynamic", (640, 1024)), tokens=kernel.tokens)
    assert kernel.probe is not None
    kernel.probe(asked)
    real = fp8.FP8Quantizer.__call__

    def wrong(self: Any, x: Tensor) -> Any:
        found = real(self, x)
        return found if found.scale is None else attrs.evolve(found, scale=found.scale.roll(1, 0))

    monkeypatch.setattr(fp8.FP8Quantizer, "__call__", wrong)
    with pytest.raises(VtensorsError):
        kernel.probe(asked)
