"""Linears of FP8 activations without a GPU: calls on the emulator against the reference, and the stacked layout."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from emulated_launches import on_the_emulator
from emulation.emulator import needs_compiler
from fp8_cases import make_fp8
from nvfp4_stream_cases import check
from vtensors.errors import RequestError
from vtensors_formats import FP8Weight
from vtensors_formats.activations import ActivationQuantizer, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_formats.weight import Weight
from vtensors_kernels.activation_quantizers.linears import QuantizedInputMatrix, QuantizedStream
from vtensors_kernels.activation_quantizers.probes import reference
from vtensors_kernels.fp8.stacked import stack_fp8
from vtensors_kernels.fp8.w8a8 import W8A8Linear
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference
from vtensors_kernels.reference.nvfp4_packing import pack_reference
from vtensors_kernels.reference.swiglu import swiglu

HALVES = [torch.bfloat16, torch.float16]
STATIC, TOKEN, GROUP = (
    FP8StaticActivation(scale=torch.tensor(0.009)),
    FP8TokenActivation(),
    FP8GroupActivation(),
)
EPILOGUES = ["linear", "linear_add", "linear_swiglu"]


def weight_of(
    kind: str, n: int, k: int, activation: ActivationQuantizer, *, seed: int = 0, bias: bool = False
) -> FP8Weight:
    weight = make_fp8(kind, n, k, seed=seed)
    added = torch.linspace(-1, 1, n) if bias else None
    return attrs.evolve(weight, activation=activation, bias=added)  # type: ignore[return-value]


def x_of(m: int, k: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    rows = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    # Tokens of different sizes, so that a scale of another token shows.
    return (rows * torch.linspace(0.3, 1.6, m).unsqueeze(1)).to(dtype)


def wanted_of(
    x: Tensor, parts: list[Weight], epilogue: str, residual: Tensor | None, activation: ActivationQuantizer
) -> Tensor:
    sums = [reference(x, part, activation) for part in parts]
    if epilogue == "linear_swiglu":
        return swiglu(*sums)
    whole = torch.cat(sums, dim=-1)
    return whole if residual is None else whole + residual.float()


@needs_compiler
@pytest.mark.fault("B31")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("activation", [STATIC, TOKEN], ids=["static", "token"])
@pytest.mark.parametrize(("kind", "m"), [("tensor", 3), ("row", 9), ("row", 37)])
def test_emulated_linears_are_the_references(
    kind: str,
    m: int,
    activation: ActivationQuantizer,
    epilogue: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_the_emulator(monkeypatch)
    parts = [weight_of(kind, 43, 304, activation, seed=i, bias=True) for i in range(2)]
    packed = pack_fp8_reference(parts, paired=epilogue == "linear_swiglu")
    call = QuantizedStream(QuantizedInputMatrix(packed=packed, activation=activation), dtype, epilogue)
    x = x_of(m, 304, dtype)
    residual = x_of(m, 86, dtype, seed=1) if epilogue == "linear_add" else None
    y = call(x, residual)
    wanted = wanted_of(x, list(parts), epilogue, residual, activation)
    check(y, wanted, dtype, roundings=2 if epilogue == "linear_swiglu" else 1)
    alone = call(x[2:3], None if residual is None else residual[2:3])
    assert torch.equal(alone, y[2:3])


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "activation"),
    [("block", GROUP), ("block", TOKEN), ("mx", MXFP8Activation()), ("mx", STATIC)],
    ids=["block-group", "block-token", "mx", "mx-static"],
)
def test_other_scales_are_emulated_too(
    kind: str, activation: ActivationQuantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_emulator(monkeypatch)
    weight, x = weight_of(kind, 44, 320, activation), x_of(5, 320, torch.bfloat16)
    packed = pack_fp8_reference([weight])
    matrix = QuantizedInputMatrix(packed=packed, activation=activation)
    y = QuantizedStream(matrix, torch.bfloat16)(x)
    check(y, reference(x, weight, activation), torch.bfloat16, roundings=2)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_nvfp4_weights_take_fp8_activations(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_emulator(monkeypatch)
    dense = torch.randn(48, 256, generator=torch.Generator().manual_seed(4)) / 16
    weight = attrs.evolve(quantize_nvfp4(dense), activation=STATIC, pre_scale=torch.linspace(0.5, 1.5, 256))
    matrix = QuantizedInputMatrix(packed=pack_reference([weight]), activation=STATIC)
    x = x_of(4, 256, dtype)
    check(QuantizedStream(matrix, dtype)(x), reference(x, weight, STATIC), dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("activation", [STATIC, TOKEN], ids=["static", "token"])
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_linears_by_cublas_are_the_references(
    kind: str,
    activation: ActivationQuantizer,
    epilogue: str,
    bias: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_the_emulator(monkeypatch)
    parts = [weight_of(kind, 48, 304, activation, seed=i, bias=bias) for i in range(2)]
    stacked = stack_fp8(parts, paired=epilogue == "linear_swiglu")
    call, x = W8A8Linear(stacked, dtype, epilogue), x_of(5, 304, dtype)
    residual = x_of(5, 96, dtype, seed=1) if epilogue == "linear_add" else None
    wanted = wanted_of(x, list(parts), epilogue, residual, activation)
    check(call(x, residual), wanted, dtype, roundings=2 if epilogue == "linear_swiglu" else 1)
    into = torch.full_like(wanted, float("nan"), dtype=dtype)
    assert torch.equal(call(x, residual, out=into), into)


@needs_compiler
@pytest.mark.fault("B10")
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("activation", [STATIC, TOKEN], ids=["static", "token"])
def test_float16_does_not_overflow_before_the_scales(
    activation: ActivationQuantizer, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_emulator(monkeypatch)
    largest = torch.full((16, 4096), 448.0).to(torch.float8_e4m3fn)
    weight = FP8Weight(codes=largest, scale=torch.full((16, 1), 1e-6), activation=activation)
    x = torch.full((2, 4096), 4.0, dtype=torch.float16)
    if emulated:
        matrix = QuantizedInputMatrix(packed=pack_fp8_reference([weight]), activation=activation)
        y = QuantizedStream(matrix, torch.float16)(x)
    else:
        y = W8A8Linear(stack_fp8([weight]), torch.float16)(x)
    check(y, reference(x, weight, activation), torch.float16)


@needs_compiler
@pytest.mark.parametrize("activation", [STATIC, TOKEN], ids=["static", "token"])
def test_many_tokens_are_cut_where_their_sums_take_too_much(
    activation: ActivationQuantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_emulator(monkeypatch)
    monkeypatch.setattr("vtensors_kernels.fp8.w8a8.SUMS_BYTES", 0)
    weight, x = weight_of("row", 16, 64, activation), x_of(150, 64, torch.bfloat16)
    y = W8A8Linear(stack_fp8([weight]), torch.bfloat16)(x)
    check(y, reference(x, weight, activation), torch.bfloat16)


@needs_compiler
def test_many_tokens_of_blocks_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_emulator(monkeypatch)
    sizes: list[int] = []
    product = torch._scaled_mm

    def counted(rows: Tensor, *rest: object, **more: object) -> Tensor:
        sizes.append(rows.shape[0])
        return product(rows, *rest, **more)  # type: ignore[no-any-return, call-overload]

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    monkeypatch.setattr("vtensors_kernels.fp8.w8a8.SUMS_BYTES", 0)
    weight, x = weight_of("block", 128, 512, GROUP), x_of(150, 512, torch.bfloat16)
    added = x_of(150, 128, torch.bfloat16, seed=1)
    y = W8A8Linear(stack_fp8([weight]), torch.bfloat16, "linear_add")(x, added)
    check(y, wanted_of(x, [weight], "linear_add", added, GROUP), torch.bfloat16)
    assert sizes == [64, 64, 24]


@needs_compiler
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("epilogue", ["linear", "linear_add"])
def test_no_tokens_give_no_rows(kind: str, epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_emulator(monkeypatch)

    def refused(*_: object, **__: object) -> Tensor:
        raise AssertionError("a product of no tokens")

    monkeypatch.setattr(torch, "_scaled_mm", refused)
    call = W8A8Linear(
        stack_fp8([weight_of(kind, 128, 512, GROUP if kind == "block" else STATIC)]), torch.bfloat16, epilogue
    )
    residual = x_of(0, 128, torch.bfloat16) if epilogue == "linear_add" else None
    assert call(x_of(0, 512, torch.bfloat16), residual).shape == (0, 128)


def test_codes_that_cublas_could_not_read_where_they_lie_are_copied() -> None:
    weight = weight_of("row", 16, 32, STATIC)
    shifted = torch.empty(16 * 32 + 1, dtype=torch.uint8)[1:].view(16, 32)
    shifted.copy_(weight.codes.view(torch.uint8))
    codes = stack_fp8([attrs.evolve(weight, codes=shifted.view(torch.float8_e4m3fn))]).codes
    assert codes.data_ptr() % 16 == 0
    assert torch.equal(codes.view(torch.uint8), weight.codes.view(torch.uint8))


@needs_compiler
@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("residual", [False, True])
def test_blocks_and_groups_by_cublas(residual: bool, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_emulator(monkeypatch)
    parts = [weight_of("block", 128, 512, GROUP), weight_of("block", 144, 512, GROUP, seed=1)]
    epilogue = "linear_add" if residual else "linear"
    call, x = W8A8Linear(stack_fp8(parts), torch.bfloat16, epilogue), x_of(m, 512, torch.bfloat16)
    added = x_of(m, 272, torch.bfloat16, seed=1) if residual else None
    check(call(x, added), wanted_of(x, list(parts), epilogue, added, GROUP), torch.bfloat16)


def test_a_stack_has_the_rows_of_its_parts_in_the_order_of_its_op() -> None:
    parts = [weight_of("row", 16, 32, STATIC, seed=i, bias=True) for i in range(2)]
    dense = [part.dequantize() for part in parts]
    stacked, paired = stack_fp8(parts), stack_fp8(parts, paired=True)
    assert stacked.row_scale is not None
    assert paired.row_scale is not None
    assert torch.equal(stacked.codes.float() * stacked.row_scale[:, None], torch.cat(dense))
    found = (paired.codes.float() * paired.row_scale[:, None]).reshape(2, 2, 8, 32)
    assert torch.equal(found[:, 0].flatten(0, 1), dense[0])
    assert torch.equal(found[:, 1].flatten(0, 1), dense[1])
    assert paired.bias is not None
    assert torch.equal(paired.bias[:8], torch.linspace(-1, 1, 16)[:8])
    assert stacked.nbytes == 2 * 16 * 32 + 4 * 32 + 4 * 32
    alone = stack_fp8(parts[:1])
    assert alone.codes.data_ptr() == parts[0].codes.data_ptr()


def test_what_cublas_does_not_take_is_refused() -> None:
    with pytest.raises(RequestError, match="in sixteens"):
        stack_fp8([weight_of("row", 24, 32, STATIC)])
    with pytest.raises(RequestError, match="no activation quantizer"):
        stack_fp8([attrs.evolve(weight_of("row", 16, 32, STATIC), activation=None)])
    with pytest.raises(RequestError, match="no such scales of blocks"):
        stack_fp8([weight_of("block", 64, 512, GROUP), weight_of("block", 64, 512, GROUP)])
    with pytest.raises(RequestError, match="no such scales of blocks"):
        stack_fp8([weight_of("block", 128, 128, GROUP)])
    with pytest.raises(RequestError, match="no such scales of blocks"):
        stack_fp8([weight_of("block", 128, 512, GROUP)] * 2, paired=True)


@needs_compiler
def test_scales_that_do_not_go_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_emulator(monkeypatch)
    for kind, activation in (("row", GROUP), ("block", TOKEN), ("row", MXFP8Activation())):
        stacked = stack_fp8([weight_of(kind, 128, 512, activation)])
        with pytest.raises(RequestError, match="groups of x, and rows with tokens"):
            W8A8Linear(stacked, torch.bfloat16)
