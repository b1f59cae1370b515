"""The packed NVFP4 layout on a CUDA device: the repack's bytes, exact widening, linears for many tokens."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch

from nvfp4_cuda_cases import (
    HALVES,
    TOLERANCE,
    every_code_and_scale,
    make_weight,
    make_x,
    poisoned,
    relative,
    replayed,
)
from vtensors.errors import RequestError
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.nvfp4_packing import pack_reference, packed_order, unpack_reference
from vtensors_kernels.reference.swiglu import swiglu

pytestmark = pytest.mark.gpu


@pytest.mark.fault("B02")
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("group", "per_row", "divisor"), [(16, False, False), (32, True, False), (16, True, True)]
)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 64), (16, 128), (17, 96), (43, 352), (200, 2048)])
def test_the_repack_kernel_writes_the_bytes_of_its_twin(
    n: int, k: int, group: int, per_row: bool, divisor: bool, paired: bool
) -> None:
    from vtensors_kernels.nvfp4.repack import pack

    parts = [make_weight(n, k, seed=i, group=group, per_row=per_row, divisor=divisor) for i in range(2)]
    parts[1] = attrs.evolve(parts[1], bias=torch.randn(n).cuda())
    if not paired:
        parts.append(make_weight(n + 3, k, seed=2, group=group))
    packed, wanted = pack(parts, paired=paired), pack_reference([p.to("cpu") for p in parts], paired=paired)
    assert torch.equal(packed.blocks.cpu(), wanted.blocks)
    assert torch.equal(packed.row_scale.cpu(), wanted.row_scale)
    assert packed.bias is not None
    assert wanted.bias is not None
    assert torch.equal(packed.bias.cpu(), wanted.bias)


@pytest.mark.fault("B69")
@pytest.mark.parametrize("k", [16, 48, 80, 176])
def test_columns_that_are_no_multiple_of_32_are_repacked(k: int) -> None:
    from vtensors_kernels.nvfp4.repack import pack

    weight = make_weight(21, k)
    assert torch.equal(pack([weight]).blocks.cpu(), pack_reference([weight.to("cpu")]).blocks)
    assert torch.equal(unpack_reference(pack([weight])).cpu(), weight.to("cpu").dequantize())


@pytest.mark.fault("B09")
@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_times_every_scale_is_widened_exactly(dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.packed_widening import PackedWidener
    from vtensors_kernels.nvfp4.repack import pack

    weight = every_code_and_scale()
    out = poisoned(128, 16, dtype=dtype)
    PackedWidener(pack([weight]), dtype, 0, 128)(out)
    assert torch.equal(out[:127].float() * 256, weight.dequantize())
    assert out[127].abs().max() == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("paired", [False, True])
def test_a_range_of_rows_is_widened_exactly(paired: bool, dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.packed_widening import PackedWidener
    from vtensors_kernels.nvfp4.repack import pack

    parts = [attrs.evolve(make_weight(43, 400, seed=i), global_scale=torch.ones(()).cuda()) for i in range(2)]
    packed = pack(parts, paired=paired)
    out = poisoned(48, 400, dtype=dtype)
    PackedWidener(packed, dtype, 32, 48)(out)
    order = packed_order(86, paired=paired)[32:80].cuda()
    wanted = torch.cat([part.dequantize() for part in parts])[order.clamp(min=0)]
    wanted[order < 0] = 0
    assert torch.equal(out.float() * 256, wanted)


@pytest.mark.fault("B69")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("per_row", "bias", "pre"), [(False, False, False), (True, False, True), (False, True, False)]
)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 48), (40, 176), (400, 400), (1030, 1024)])
@pytest.mark.parametrize("m", [1, 65, 130])
def test_packed_widening_agrees_with_the_reference(
    m: int, n: int, k: int, per_row: bool, bias: bool, pre: bool, dtype: torch.dtype
) -> None:
    from vtensors_kernels.nvfp4.packed_widening import bind_linear, bind_linear_add
    from vtensors_kernels.nvfp4.repack import pack

    weight = make_weight(n, k, per_row=per_row)
    if bias:
        weight = attrs.evolve(weight, bias=torch.randn(n).cuda())
    x, residual = make_x(m, k, dtype), make_x(m, n, dtype, seed=1)
    wide = x.float()
    if pre:
        pre_scale = torch.rand(k).cuda() + 0.5
        wide, weight = (wide * pre_scale).to(dtype).float(), attrs.evolve(weight, pre_scale=pre_scale)
    wanted = linear(wide, attrs.evolve(weight, pre_scale=None))
    packed = pack([weight])
    ours = bind_linear(packed, dtype)(x, out=poisoned(m, n, dtype=dtype))
    assert relative(ours, wanted) < TOLERANCE[dtype]
    ours = bind_linear_add(packed, dtype)(x, residual, out=poisoned(m, n, dtype=dtype))
    assert relative(ours, wanted + residual.float()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("f", "k"), [(1, 16), (8, 48), (43, 176), (512, 400)])
def test_packed_widening_computes_a_swiglu(f: int, k: int, per_row: bool, dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.packed_widening import bind_linear_swiglu
    from vtensors_kernels.nvfp4.repack import pack

    gate, up = make_weight(f, k, per_row=per_row), make_weight(f, k, seed=1, per_row=per_row)
    if not per_row:  # one scale for both: cuBLAS applies it
        up = attrs.evolve(up, global_scale=gate.global_scale)
    x = make_x(70, k, dtype)
    ours = bind_linear_swiglu(pack([gate, up], paired=True), dtype)(x, out=poisoned(70, f, dtype=dtype))
    assert relative(ours, swiglu(linear(x.float(), gate), linear(x.float(), up))) < 3 * TOLERANCE[dtype]


def test_a_matrix_beyond_the_scratch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensors_kernels.nvfp4 import packed_widening
    from vtensors_kernels.nvfp4.repack import pack

    monkeypatch.setattr(packed_widening, "SCRATCH_BYTES", 48 * 256 * 2)
    weight, x = make_weight(333, 256), make_x(66, 256, torch.bfloat16)
    pair, residual = make_weight(333, 256, seed=1), make_x(66, 333, torch.bfloat16, seed=2)
    wanted = linear(x.float(), weight)
    ours = packed_widening.bind_linear(pack([weight]), x.dtype)(x)
    assert relative(ours, wanted) < 4e-3
    ours = packed_widening.bind_linear_add(pack([weight, pair]), x.dtype)(x, residual.repeat(1, 2))
    assert relative(ours[:, :333], wanted + residual.float()) < 4e-3
    ours = packed_widening.bind_linear_swiglu(pack([weight, pair], paired=True), x.dtype)(x)
    assert relative(ours, swiglu(wanted, linear(x.float(), pair))) < 12e-3


@pytest.mark.parametrize("kind", ["widening", "swiglu", "add"])
def test_a_hundred_replays_agree(kind: str) -> None:
    from vtensors_kernels.nvfp4.packed_widening import bind_linear, bind_linear_add, bind_linear_swiglu
    from vtensors_kernels.nvfp4.repack import pack

    weight, x = make_weight(400, 1024, per_row=True), make_x(70, 1024, torch.bfloat16)
    residual = make_x(70, 400, torch.bfloat16, seed=1)
    plain, add = bind_linear(pack([weight]), x.dtype), bind_linear_add(pack([weight]), x.dtype)
    both = bind_linear_swiglu(pack([weight, make_weight(400, 1024, seed=1)], paired=True), x.dtype)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "widening": lambda: plain(x),
        "swiglu": lambda: both(x),
        "add": lambda: add(x, residual),
    }
    first, last = replayed(calls[kind])
    assert torch.equal(first, last)
    assert torch.equal(first, calls[kind]())


def test_a_matrix_packed_for_another_op_is_refused() -> None:
    from vtensors_kernels.nvfp4 import packed_widening
    from vtensors_kernels.nvfp4.repack import pack

    with pytest.raises(RequestError, match="packed for another op"):
        packed_widening.bind_linear_swiglu(pack([make_weight(32, 64)]), torch.bfloat16)
