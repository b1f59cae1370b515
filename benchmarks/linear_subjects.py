"""The implementations that the linear benchmark times, each bound to enough copies of one random weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import attrs
import linear_goals as table
import torch
from peers.marlin import Marlin
from selected import bind_linear, no_dependent_launches
from torch import Tensor

from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight, PlainWeight
from vtensors_formats.activations import ActivationQuantizer, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8TokenActivation

TensorCall = Callable[[Tensor], Tensor]
ROWS_AT_ONCE = 16384
# Powers of two, so that they add no rounding; what they scale stays within E4M3's 448.
_W_SCALE, _X_SCALE = 2.0**-11, 2.0**-6


@attrs.frozen(kw_only=True)
class Fixture:
    """A random NVFP4 weight [N, K], rows x [M, K] in bfloat16, and x @ W.T [M, N] in float32."""

    weight: NVFP4Weight
    x: Tensor
    product: Tensor


@attrs.frozen(kw_only=True)
class Subject:
    """One implementation. calls: x -> [M, N], one per copy of the weight. nbytes: of one copy as it is read.

    product: what the calls must give, [M, N] float32. kernel: rows -> name of what computes them. around: in
    force while a call is made or captured.
    """

    impl: str
    calls: list[TensorCall]
    nbytes: int
    product: Tensor
    kernel: Callable[[int], str]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def make_fixture(n: int, k: int, rows: int, device: torch.device) -> Fixture:
    """Random codes, scales of ordinary size, normal activations."""
    weight = NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device),
        block_scale=torch.empty(n, k // 16, device=device).uniform_(24, 160).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 8192, device=device),
    )
    x = torch.randn(rows, k, device=device).bfloat16()
    return Fixture(weight=weight, x=x, product=_product(x, weight))


def bytes_read(impl: str, n: int, k: int) -> int:
    """Bytes of the weight that an implementation must read."""
    if impl in (table.CUBLAS, table.OURS_BF16):
        return 2 * n * k
    if impl in (table.SCALED_MM, table.MARLIN_FP8, table.OURS_FP8, *table.W8A8):
        return n * k
    if impl == table.OURS_FP8_BLOCK:
        return n * k + 4 * -(-n // 128) * -(-k // 128)
    return n * k + n * k // 32 if impl == table.OURS_MXFP8 else table.nvfp4_bytes(n, k)


def make_subject(impl: str, fixture: Fixture, marlin: Marlin | str, copies: int) -> Subject:
    """The implementation of that name, bound to that many copies of the fixture's weight.

    Errors: RuntimeError where Marlin is not there; whatever preparing and binding raise.
    """
    n, k = fixture.weight.shape
    nbytes = bytes_read(impl, n, k)
    if impl in (table.OURS, table.OURS_APART):
        return _ours(impl, fixture, nbytes, copies)
    if impl in (table.OURS_FP8, table.OURS_FP8_BLOCK, table.OURS_MXFP8):
        return _ours_fp8(impl, fixture, nbytes, copies)
    if impl == table.OURS_BF16:
        return _ours_bf16(fixture, nbytes, copies)
    if impl in table.W8A8:
        return _ours_w8a8(impl, fixture, nbytes, copies)
    if impl == table.CUBLAS:
        matrix = _bfloat16(fixture.weight)
        matrices = [matrix, *(matrix.clone() for _ in range(copies - 1))]
        calls = [_bf16_call(each) for each in matrices]
        return _subject(impl, calls, nbytes, fixture.product, "cuBLAS")
    if impl == table.SCALED_MM:
        return _scaled_mm(fixture, nbytes, copies)
    if isinstance(marlin, str):
        raise RuntimeError(marlin)
    if impl == table.MARLIN:
        calls = [marlin.bind_nvfp4(fixture.weight) for _ in range(copies)]
        return _subject(impl, calls, nbytes, fixture.product, "marlin_gemm")
    if impl == table.MARLIN_FP8:
        weight = _fp8(fixture.weight)
        calls = [marlin.bind_fp8(weight) for _ in range(copies)]
        return _subject(impl, calls, nbytes, _product(fixture.x, weight), "marlin_gemm")
    raise RuntimeError(f"unknown implementation {impl}")


def _ours(impl: str, fixture: Fixture, nbytes: int, copies: int) -> Subject:
    # A kernel that reads the weight as stored must find each copy in memory of its own.
    bound = [
        bind_linear([_clone(fixture.weight)], "linear", torch.bfloat16, fixture.x.device)
        for _ in range(copies)
    ]
    return Subject(
        impl=impl,
        calls=[each.call for each in bound],
        nbytes=nbytes,
        product=fixture.product,
        kernel=bound[0].kernel_for,
        around=no_dependent_launches if impl == table.OURS_APART else nullcontext,
    )


def _ours_fp8(impl: str, fixture: Fixture, nbytes: int, copies: int) -> Subject:
    """The codes of `_fp8` under a scale for all, for blocks of 128 x 128, or for 32 columns."""
    plain = _fp8(fixture.weight)
    n, k = plain.shape
    weight: FP8Weight | MXFP8Weight = plain
    if impl == table.OURS_FP8_BLOCK:
        scale = plain.scale * torch.ones(-(-n // 128), -(-k // 128), device=plain.device)
        weight = attrs.evolve(plain, scale=scale, block=(128, 128))
    elif impl == table.OURS_MXFP8:
        exponents = torch.full((n, k // 32), 127 + round(math.log2(_W_SCALE)), dtype=torch.uint8)
        weight = MXFP8Weight(codes=plain.codes, scale=exponents.to(plain.device))
    # A kernel that reads the weight as stored must find each copy in memory of its own.
    bound = [
        bind_linear(
            [attrs.evolve(weight, codes=weight.codes.clone())], "linear", torch.bfloat16, fixture.x.device
        )
        for _ in range(copies)
    ]
    return Subject(
        impl=impl,
        calls=[each.call for each in bound],
        nbytes=nbytes,
        product=_product(fixture.x, plain),
        kernel=bound[0].kernel_for,
    )


def _ours_bf16(fixture: Fixture, nbytes: int, copies: int) -> Subject:
    matrix, device = _bfloat16(fixture.weight), fixture.x.device
    bound = [
        bind_linear([PlainWeight(tensor=matrix.clone())], "linear", torch.bfloat16, device)
        for _ in range(copies)
    ]
    return Subject(
        impl=table.OURS_BF16,
        calls=[each.call for each in bound],
        nbytes=nbytes,
        product=fixture.product,
        kernel=bound[0].kernel_for,
    )


def _ours_w8a8(impl: str, fixture: Fixture, nbytes: int, copies: int) -> Subject:
    """The codes of `_fp8` under a scale for all or one per row; quantizing x is part of the call."""
    plain, x = _fp8(fixture.weight), fixture.x
    activation: ActivationQuantizer = FP8StaticActivation(scale=torch.tensor(_X_SCALE, device=x.device))
    if impl == table.OURS_W8A8_TOKEN:
        scale = plain.scale.expand(plain.shape[0], 1).contiguous()
        plain, activation = attrs.evolve(plain, scale=scale), FP8TokenActivation()
    bound = [
        bind_linear(
            [attrs.evolve(plain, codes=plain.codes.clone(), activation=activation)],
            "linear",
            torch.bfloat16,
            x.device,
            activations=activation.kind,
            only="*_emulated*" if impl == table.OURS_W8A8_EMULATED else "*",
        )
        for _ in range(copies)
    ]
    return Subject(
        impl=impl,
        calls=[each.call for each in bound],
        nbytes=nbytes,
        product=_product(activation(x.float()), plain),
        kernel=bound[0].kernel_for,
    )


def _scaled_mm(fixture: Fixture, nbytes: int, copies: int) -> Subject:
    weight = _fp8(fixture.weight)
    x = (fixture.x.float() / _X_SCALE).to(torch.float8_e4m3fn)
    scales = torch.tensor(_X_SCALE, device=x.device), torch.tensor(_W_SCALE, device=x.device)
    matrices = [weight.codes, *(weight.codes.clone() for _ in range(copies - 1))]
    calls = [_fp8_call(x, each, *scales) for each in matrices]
    product = _product((x.float() * _X_SCALE), weight)
    return _subject(table.SCALED_MM, calls, nbytes, product, "torch._scaled_mm")


def _subject(impl: str, calls: list[TensorCall], nbytes: int, product: Tensor, kernel: str) -> Subject:
    return Subject(impl=impl, calls=calls, nbytes=nbytes, product=product, kernel=lambda rows: kernel)


def _bf16_call(matrix: Tensor) -> TensorCall:
    return lambda x: torch.nn.functional.linear(x, matrix)


def _fp8_call(x: Tensor, matrix: Tensor, x_scale: Tensor, w_scale: Tensor) -> TensorCall:
    """The activations are quantized beforehand: only the number of rows is taken from the argument."""

    def call(rows: Tensor) -> Tensor:
        result: Tensor = torch._scaled_mm(
            x[: rows.shape[0]], matrix.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return result

    return call


def _clone(weight: NVFP4Weight) -> NVFP4Weight:
    return attrs.evolve(weight, codes=weight.codes.clone(), block_scale=weight.block_scale.clone())


def _bfloat16(weight: NVFP4Weight) -> Tensor:
    return torch.cat([block.bfloat16() for block in _blocks(weight)])


def _fp8(weight: NVFP4Weight) -> FP8Weight:
    codes = torch.cat([(block / _W_SCALE).to(torch.float8_e4m3fn) for block in _blocks(weight)])
    return FP8Weight(codes=codes, scale=torch.tensor(_W_SCALE, device=codes.device))


def _product(x: Tensor, weight: NVFP4Weight | FP8Weight) -> Tensor:
    return torch.cat([x.float() @ block.T for block in _blocks(weight)], dim=1)


def _blocks(weight: NVFP4Weight | FP8Weight) -> Iterator[Tensor]:
    """The weight's rows in float32, some at a time: a whole head would take 5 GB."""
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, weight.shape[0])
        yield weight.rows(start, end).dequantize(torch.float32)
