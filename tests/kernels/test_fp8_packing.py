"""The packed FP8 layout on a CPU: every code, scales of every kind, tails, stacked and paired parts, all bit-exact."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_cases import KINDS, every_code, make_fp8
from vtensors.errors import RequestError
from vtensors_formats import FP8Weight, MXFP8Weight
from vtensors_kernels.fp8.packed import SCALES_OF, Scales
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.scales import row_scale
from vtensors_kernels.packed_tiles import column_steps, row_tiles
from vtensors_kernels.packing import row_values
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference, unpack_fp8_reference


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def dequantized(parts: list[FP8Weight | MXFP8Weight]) -> torch.Tensor:
    return torch.cat([part.dequantize() for part in parts])


@pytest.mark.parametrize("kind", KINDS)
def test_every_finite_code_comes_back_bit_for_bit(kind: str) -> None:
    weight = every_code(kind)
    packed = pack_fp8_reference([weight])
    assert torch.equal(bits(unpack_fp8_reference(packed)), bits(weight.dequantize()))
    assert packed.scales is SCALES_OF[weight.scheme]


def test_all_256_bytes_are_moved_and_none_is_lost() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128).view(torch.float8_e4m3fn)
    packed = pack_fp8_reference([FP8Weight(codes=codes, scale=torch.ones(()))])
    words = packed.blocks[0, 0].view(torch.int32)
    assert len(set(words.tolist())) == 64 + 1
    ones = sum(bin(word & 0xFFFFFFFF).count("1") for word in words.tolist())
    assert ones == 256 * 8 // 2


def test_a_word_of_the_layout_holds_what_the_header_says() -> None:
    codes = torch.zeros(1, 128, dtype=torch.uint8)
    codes[0, :4] = torch.tensor([0xFE, 0x01, 0xCB, 0x75], dtype=torch.uint8)
    packed = pack_fp8_reference([FP8Weight(codes=codes.view(torch.float8_e4m3fn), scale=torch.tensor(2.0))])
    word = int.from_bytes(bytes(packed.blocks[0, 0, :4].tolist()), "little")
    first = 1 << 15 | 0x7E << 4 | 0x01 << 20
    second = (1 << 11 | 0x4 << 12 | 0xB) | (0x7 << 12 | 0x5) << 16
    assert word == first | second
    assert packed.row_scale.tolist() == [512.0] + [0.0] * 15


@pytest.mark.parametrize("place", [0, 3, 4, 31, 32, 63, 64, 71, 72, 95, 96, 127])
@pytest.mark.parametrize("row", [0, 7, 8, 15])
def test_each_row_and_column_lies_where_the_header_says(row: int, place: int) -> None:
    codes = torch.zeros(16, 128, dtype=torch.uint8)
    codes[row, place] = 1
    weight = FP8Weight(codes=codes.view(torch.float8_e4m3fn), scale=torch.ones(()))
    quarter = place // 32
    chunk = place % 32 // 8 ^ quarter >> 1
    word = 2 * chunk + place % 8 // 4
    start = 512 * (2 * (row // 8) + word // 4) + 16 * (4 * (row % 8) + quarter) + 4 * (word % 4)
    found = pack_fp8_reference([weight]).blocks[0, 0].nonzero().flatten().tolist()
    assert len(found) == 1
    assert start <= found[0] < start + 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 32), (7, 64), (16, 128), (17, 96), (40, 160), (33, 352), (300, 544)]
)
def test_tails_of_rows_and_columns_come_back(n: int, k: int, kind: str) -> None:
    weight = make_fp8(kind, n, k)
    packed = pack_fp8_reference([weight])
    assert packed.blocks.shape == (row_tiles(n), column_steps(k), packed.scales.block_bytes)
    assert torch.equal(bits(unpack_fp8_reference(packed)), bits(weight.dequantize()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_parts_come_back_in_their_own_order(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS), "kind")
    k = (32 if kind == "mx" else 16) * data.draw(st.integers(1, 20), "K")
    paired = data.draw(st.booleans(), "paired")
    unit = 4 if kind == "block" else 1
    one = unit * data.draw(st.integers(1, 40 // unit), "rows")
    drawn = st.lists(st.integers(1, 40 // unit).map(lambda i: unit * i), min_size=1, max_size=4)
    rows = [one, one] if paired else data.draw(drawn, "rows")
    block = data.draw(st.sampled_from([(4, 128), (8, 256), (128, 128), (12, 128)]), "block")
    parts = [make_fp8(kind, n, k, seed=i, block=block) for i, n in enumerate(rows)]
    packed = pack_fp8_reference(parts, paired=paired)
    assert torch.equal(bits(unpack_fp8_reference(packed)), bits(dequantized(parts)))


@pytest.mark.parametrize("start", [4, 20, 128])
def test_rows_cut_from_a_matrix_of_blocks_keep_their_scales(start: int) -> None:
    weight = make_fp8("block", 300, 256).rows(start, 290)
    assert torch.equal(bits(unpack_fp8_reference(pack_fp8_reference([weight]))), bits(weight.dequantize()))


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16, torch.uint8])
def test_scales_stored_in_other_formats_are_widened_exactly(scale: torch.dtype) -> None:
    weight = make_fp8("block", 40, 256)
    stored = torch.full((1, 2), 120, dtype=scale) if scale == torch.uint8 else weight.scale.to(scale)
    weight = attrs.evolve(weight, scale=stored)
    assert torch.equal(bits(unpack_fp8_reference(pack_fp8_reference([weight]))), bits(weight.dequantize()))


@pytest.mark.parametrize(("low", "high"), [(0, 40), (100, 220), (200, 254)])
def test_every_size_of_e8m0_scale_comes_back(low: int, high: int) -> None:
    weight = make_fp8("mx", 40, 352, size=False)
    spread = torch.arange(weight.scale.numel()).reshape(weight.scale.shape) % (high - low + 1) + low
    weight = attrs.evolve(weight, scale=spread.to(torch.uint8))
    assert torch.equal(bits(unpack_fp8_reference(pack_fp8_reference([weight]))), bits(weight.dequantize()))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [4, 8, 20])
def test_scales_follow_the_packed_rows(n: int, kind: str, paired: bool) -> None:
    """The twin orders by an index, the launcher by padding and stacking; they must agree."""
    parts = [make_fp8(kind, n, 32, seed=i) for i in range(2)]
    wanted = pack_fp8_reference(parts, paired=paired).row_scale
    assert torch.equal(row_values([row_scale(part) for part in parts], 2 * n, paired=paired), wanted)


def test_scales_per_matrix_and_per_row_are_packed_together() -> None:
    parts = [make_fp8("tensor", 5, 32), make_fp8("row", 3, 32)]
    assert torch.equal(bits(unpack_fp8_reference(pack_fp8_reference(parts))), bits(dequantized(parts)))


def test_what_the_layout_has_no_place_for_is_refused() -> None:
    with pytest.raises(RequestError, match="scale for 128 columns"):
        pack_fp8_reference([make_fp8("block", 64, 256, block=(64, 64))])
    with pytest.raises(RequestError, match="scale for 4 rows"):
        pack_fp8_reference([make_fp8("block", 64, 256, block=(6, 128))])
    with pytest.raises(RequestError, match="scale for 4 rows"):
        pack_fp8_reference([make_fp8("block", 300, 256).rows(2, 290)])
    with pytest.raises(RequestError, match="one kind of scales"):
        pack_fp8_reference([make_fp8("tensor", 16, 128), make_fp8("mx", 16, 128)])
    with pytest.raises(RequestError, match="share K and device"):
        pack_fp8_reference([make_fp8("tensor", 16, 128), make_fp8("tensor", 16, 160)])
    with pytest.raises(RequestError, match="on a CUDA device"):
        pack_fp8([make_fp8("tensor", 16, 128)])


def test_sizes_of_blocks_are_those_of_the_header() -> None:
    assert [scales.block_bytes for scales in Scales] == [2048, 2064, 2112]
