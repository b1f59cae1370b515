"""Block-scaled 4-bit products: packed operands as PTX lays them out; the kernel run on the CPU with that product."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight, e2m1, e4m3
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.nvfp4.block_scaled import EPILOGUES, FUNCTION, INSTANTIATIONS, SOURCE, TOKEN_TILES
from vtensors_kernels.nvfp4.block_scaled_packing import (
    BlockScaledNVFP4,
    both_global_scales,
    operand_blocks,
    pack_block_scaled,
)
from vtensors_kernels.packed_tiles import column_steps, row_tiles
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.nvfp4_activations import fragments
from vtensors_kernels.reference.swiglu import swiglu

HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def weight_of(
    n: int, k: int, *, seed: int = 0, group: int = 16, divisor: bool = False, bias: bool = False
) -> NVFP4Weight:
    """Any codes, block scales of every size but NaN; with activations of the same convention."""
    source = torch.Generator().manual_seed(seed * 7919 + n + k)
    scales = torch.randint(0, 127, (n, k // group), generator=source, dtype=torch.uint8)
    weight = NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=scales.view(torch.float8_e4m3fn),
        global_scale=None if divisor else torch.tensor(2e-4 / k**0.5),
        global_divisor=torch.tensor(5e3 * k**0.5) if divisor else None,
        activation=FP4Activation(global_divisor=torch.tensor(431.0))
        if divisor
        else FP4Activation(global_scale=torch.tensor(0.0021)),
    )
    return attrs.evolve(weight, bias=torch.linspace(-1, 1, n)) if bias else weight


def x_of(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


def exact(x: Tensor, weight: NVFP4Weight) -> Tensor:
    """float32 [M, N] of the reference, whose activations are not rounded to 16 bits behind the quantizer."""
    return linear(x.float(), weight, weight.activation)


def multiplied(
    x: Tensor, weight: BlockScaledNVFP4, *, tiles: int, residual: Tensor | None = None, seed: int = 0
) -> Tensor:
    """What the kernel gives."""
    (n, k), m = weight.shape, x.shape[0]
    found = weight.activation.codes(x)
    epilogue = "linear_swiglu" if weight.paired else "linear" if residual is None else "linear_add"
    defines = {
        "VT_F16": int(x.dtype == torch.float16),
        "VT_TOKEN_TILES": tiles,
        "VT_EPILOGUE": EPILOGUES[epilogue],
        "__CUDA_ARCH_SPECIFIC__": 1210,
    }
    out = torch.full((m, n // 2 if weight.paired else n), float("nan"), dtype=x.dtype)
    operands = [
        weight.blocks,
        weight.row_scale,
        weight.bias,
        fragments(found.codes, found.scale),
        residual,
        out,
    ]
    grid = row_tiles(n) * -(-m // (8 * tiles))
    emulate(
        SOURCE, FUNCTION, defines, (grid,), (256,), [*operands, m, n, column_steps(k)], arch=1210, seed=seed
    )
    return out


def check(y: Tensor, wanted: Tensor) -> None:
    assert float((y.float() - wanted).norm() / wanted.norm()) < TOLERANCE[y.dtype]


def test_each_code_and_scale_lies_where_the_product_reads_it() -> None:
    source = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (32, 192 // 2), generator=source, dtype=torch.uint8)
    scales = torch.randint(0, 127, (32, 192 // 16), generator=source, dtype=torch.uint8)
    blocks, plain = operand_blocks(codes, scales), e2m1.unpack(codes)
    for lane in range(32):
        g, c = lane // 4, lane % 4
        for tile, step, s in ((0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 0)):
            at = 512 * s + 16 * lane
            registers = e2m1.unpack(blocks[tile, step, at : at + 16]).view(4, 8)
            for r in range(4):  # PTX ISA: row g + 8 (r % 2), k = 8 c + 32 (r / 2) ..
                first = 128 * step + 64 * s + 32 * (r // 2) + 8 * c
                assert torch.equal(registers[r], plain[16 * tile + g + 8 * (r % 2), first : first + 8])
            # Lane c = 0 brings the four scales of row g, c = 1 those of row g + 8.
            at = 1024 + 16 * g + 8 * (lane % 2) + 4 * s
            first = (128 * step + 64 * s) // 16
            row = 16 * tile + g + 8 * (lane % 2)
            assert torch.equal(blocks[tile, step, at : at + 4], scales[row, first : first + 4])
    # Columns 192 .. 255 and their scales are padding.
    assert not blocks[:, 1, 512:1024].any()
    assert not blocks[:, 1, 1024:].view(2, 16, 8)[..., 4:].any()


@pytest.mark.parametrize("divisor", [False, True])
def test_both_global_scales_are_in_the_rows_scale_and_are_rounded_once(divisor: bool) -> None:
    weight = weight_of(5, 64, divisor=divisor)
    scale = both_global_scales(weight)
    wanted = 1 / (5e3 * 8 * 431.0) if divisor else 2e-4 / 8 * 0.0021
    assert scale.shape == (5,)
    assert scale[0].item() == pytest.approx(wanted, rel=1e-7)


def test_parts_with_other_input_scales_or_none_are_not_packed_together() -> None:
    weight = weight_of(16, 64)
    other = attrs.evolve(weight, activation=FP4Activation(global_scale=torch.tensor(0.5)))
    with pytest.raises(RequestError, match="need one input scale"):
        pack_block_scaled([weight, other])
    with pytest.raises(RequestError, match="without a 4-bit input scale"):
        pack_block_scaled([attrs.evolve(weight, activation=None)])


@needs_compiler
@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("m", "n", "k", "tiles"),
    [
        (1, 16, 64, 1),
        (1, 40, 2048, 1),
        (3, 37, 1104, 1),
        (17, 16, 192, 4),
        (40, 24, 320, 8),
        (70, 16, 128, 8),
    ],
)
def test_a_linear_is_the_references(
    m: int, n: int, k: int, tiles: int, dtype: torch.dtype, divisor: bool
) -> None:
    weight, x = weight_of(n, k, divisor=divisor, bias=n == 37), x_of(m, k, dtype)
    check(multiplied(x, pack_block_scaled([weight]), tiles=tiles, seed=m), exact(x, weight))


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_parts_side_by_side_keep_their_own_global_scales(dtype: torch.dtype) -> None:
    first, x = weight_of(21, 256), x_of(5, 256, dtype)
    second = attrs.evolve(weight_of(19, 256, seed=1), global_scale=torch.tensor(3e-5))
    y = multiplied(x, pack_block_scaled([first, second]), tiles=1)
    check(y[:, :21], exact(x, first))
    check(y[:, 21:], exact(x, second))


@needs_compiler
@pytest.mark.parametrize(("m", "f"), [(2, 8), (9, 20)])
def test_gate_and_up_are_multiplied_behind_the_sums(m: int, f: int) -> None:
    gate, up, x = (
        weight_of(f, 384, bias=True),
        weight_of(f, 384, seed=1, bias=True),
        x_of(m, 384, torch.bfloat16),
    )
    y = multiplied(x, pack_block_scaled([gate, up], paired=True), tiles=2)
    check(y, swiglu(exact(x, gate), exact(x, up)))


@needs_compiler
def test_a_residual_is_added_before_the_one_rounding() -> None:
    weight, x = weight_of(33, 256), x_of(3, 256, torch.bfloat16)
    residual = x_of(3, 33, torch.bfloat16)
    y = multiplied(x, pack_block_scaled([weight]), tiles=1, residual=residual)
    check(y, exact(x, weight) + residual.float())


@needs_compiler
def test_groups_of_32_have_their_scale_twice() -> None:
    weight, x = weight_of(16, 192, group=32), x_of(2, 192, torch.float16)
    check(multiplied(x, pack_block_scaled([weight]), tiles=1), exact(x, weight))


@needs_compiler
def test_a_row_is_the_same_bits_in_every_form_and_place() -> None:
    weight, x = pack_block_scaled([weight_of(16, 1280)]), x_of(19, 1280, torch.bfloat16)
    alone = multiplied(x[18:], weight, tiles=1)
    for tiles in TOKEN_TILES:
        assert torch.equal(multiplied(x, weight, tiles=tiles)[18:], alone)


@needs_compiler
def test_a_nan_of_one_token_stays_with_it() -> None:
    weight, x = pack_block_scaled([weight_of(16, 256)]), x_of(9, 256, torch.bfloat16)
    alone = multiplied(x, weight, tiles=2)
    x[4, 100] = float("nan")
    y = multiplied(x, weight, tiles=2)
    assert y[4].isnan().all()
    assert torch.equal(y[torch.arange(9) != 4], alone[torch.arange(9) != 4])


@needs_compiler
@pytest.mark.fault("B09")
def test_every_block_scale_of_either_operand_counts() -> None:
    scale = torch.arange(127, dtype=torch.uint8).reshape(127, 1).repeat(1, 4)
    weight = NVFP4Weight(
        codes=torch.full((127, 32), 0x22, dtype=torch.uint8),
        block_scale=scale.view(torch.float8_e4m3fn),
        global_scale=torch.tensor(1.0),
        activation=FP4Activation(global_scale=torch.tensor(1.0)),
    )
    # Token t asks for the block scale of byte 8 t + 1: its largest is six times that.
    x = (scale[1::8, :1].contiguous().view(torch.float8_e4m3fn).float() * 6).repeat(1, 64).to(torch.float16)
    y = multiplied(x, pack_block_scaled([weight]), tiles=2)
    wanted = exact(x, weight).to(torch.float16)
    assert torch.equal(y, wanted)
    assert e4m3.as_bytes(weight.activation.codes(x).scale).unique().numel() == 16


def test_every_form_is_compiled_for_the_two_targets_and_must_have_the_block_scaled_product() -> None:
    for form in INSTANTIATIONS:
        assert form.targets == ("sm_120a", "sm_121a")
        assert [form.features(target) for target in form.targets] == [("omma",), ("omma",)]
