"""The packed NVFP4 layout on a CPU: every code and scale, tails, stacked and paired parts, all bit-exact."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES
from vtensors_kernels.nvfp4.repack import pack, row_scale
from vtensors_kernels.packed_tiles import column_steps, row_tiles
from vtensors_kernels.packing import row_values
from vtensors_kernels.reference.nvfp4_packing import pack_reference, packed_order, unpack_reference


def make_weight(
    n: int, k: int, *, seed: int = 0, group: int = 16, per_row: bool = False, divisor: bool = False
) -> NVFP4Weight:
    source = torch.Generator().manual_seed(seed * 1_000_003 + n * 7919 + k)
    scales = torch.randint(1, 127, (n, k // group), generator=source, dtype=torch.uint8)
    scale = torch.rand((n, 1) if per_row else (), generator=source) * 1e-2 + 1e-3
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=scales.view(torch.float8_e4m3fn),
        global_scale=None if divisor else scale,
        global_divisor=1 / scale if divisor else None,
    )


def every_code_and_scale() -> NVFP4Weight:
    """A block per finite scale, zero and subnormals too, holding all 16 codes; zero codes under the zero."""
    codes = torch.tensor([(2 * i) | (2 * i + 1) << 4 for i in range(8)], dtype=torch.uint8).repeat(127, 1)
    codes[0] = 0x80
    scale = torch.arange(127, dtype=torch.uint8).reshape(127, 1).view(torch.float8_e4m3fn)
    return NVFP4Weight(codes=codes, block_scale=scale, global_scale=torch.tensor(0.37))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def dequantized(parts: list[NVFP4Weight]) -> torch.Tensor:
    return torch.cat([part.dequantize() for part in parts])


def test_every_code_times_every_scale_comes_back_bit_for_bit() -> None:
    weight = every_code_and_scale()
    assert torch.equal(bits(unpack_reference(pack_reference([weight]))), bits(weight.dequantize()))


def test_codes_under_a_zero_scale_become_zeros() -> None:
    weight = every_code_and_scale()
    weight.codes[0] = 0xF7
    packed = pack_reference([weight])
    assert unpack_reference(packed)[0].abs().max() == 0
    # The signs of the odd elements are left: bits 31, 29, 25 and 19.
    assert packed.blocks[0, 0, :8].tolist() == [0, 0, 1 << 3, 0b1010_0010] * 2


def test_a_word_of_the_layout_holds_what_the_header_says() -> None:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, :4] = torch.tensor([0x21, 0x43, 0x65, 0x8F], dtype=torch.uint8)  # codes 1 2 3 4 5 6 15 8
    scale = torch.full((1, 8), 1.0).to(torch.float8_e4m3fn)
    packed = pack_reference([NVFP4Weight(codes=codes, block_scale=scale, global_scale=torch.tensor(2.0))])
    low = 1 << 30 | 3 << 4 | 5 | (1 << 3 | 7 << 26)
    high = 1 << 23 | 4 << 20 | 6 << 16 | 1 << 19
    word = int.from_bytes(bytes(packed.blocks[0, 0, :4].tolist()), "little")
    assert word == low | high
    assert packed.blocks[0, 0, 1024:1026].tolist() == [80, 80]  # 2^0: 10 << 3
    assert packed.row_scale.tolist() == [512.0] + [0.0] * 15


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 95, 96, 127])
@pytest.mark.parametrize("row", [0, 7, 8, 15])
def test_each_row_and_column_lies_where_the_header_says(row: int, place: int) -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[row, place // 2] = 1 << 4 * (place % 2)
    weight = NVFP4Weight(
        codes=codes,
        block_scale=torch.ones(16, 8).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1.0),
    )
    quarter, word = place // 32, place % 32 // 8 ^ place // 64
    start = 512 * (row // 8) + 16 * (4 * (row % 8) + quarter) + 4 * word
    found = pack_reference([weight]).blocks[0, 0, :1024].nonzero().flatten().tolist()
    assert len(found) == 1
    assert start <= found[0] < start + 4


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 64), (16, 128), (17, 96), (40, 160), (33, 352)])
def test_tails_of_rows_and_columns_come_back(n: int, k: int, group: int) -> None:
    weight = make_weight(n, k, group=group)
    packed = pack_reference([weight])
    assert packed.blocks.shape == (row_tiles(n), column_steps(k), BLOCK_BYTES)
    assert torch.equal(bits(unpack_reference(packed)), bits(weight.dequantize()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_parts_come_back_in_their_own_order(data: st.DataObject) -> None:
    k = 16 * data.draw(st.integers(1, 20), "K / 16")
    paired = data.draw(st.booleans(), "paired")
    group = data.draw(st.sampled_from([16, 32] if k % 32 == 0 else [16]), "group")
    one = data.draw(st.integers(1, 40), "rows")
    rows = [one, one] if paired else data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "rows")
    per_row = data.draw(st.booleans(), "scale per row")
    parts = [make_weight(n, k, seed=i, group=group, per_row=per_row) for i, n in enumerate(rows)]
    assert torch.equal(bits(unpack_reference(pack_reference(parts, paired=paired))), bits(dequantized(parts)))


def test_paired_rows_alternate_by_eight_and_pad_each_half() -> None:
    order = packed_order(20, paired=True).tolist()
    assert order[:16] == [*range(8), *range(10, 18)]
    assert order[16:] == [8, 9, *[-1] * 6, 18, 19, *[-1] * 6]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("n", [3, 8, 20])
def test_scales_and_biases_follow_the_packed_rows(n: int, paired: bool) -> None:
    """The twin orders by an index, the launcher by padding and stacking; they must agree."""
    parts = [make_weight(n, 16, seed=i, per_row=True) for i in range(2)]
    wanted = pack_reference(parts, paired=paired).row_scale
    assert torch.equal(row_values([row_scale(part) for part in parts], 2 * n, paired=paired), wanted)


def test_a_divisor_is_inverted_once_in_double_precision() -> None:
    weight = make_weight(5, 32, per_row=True, divisor=True)
    assert weight.global_divisor is not None
    packed = pack_reference([weight])
    exact = 256.0 / weight.global_divisor.double().flatten()
    assert torch.equal(packed.row_scale[:5], exact.float())
    ours, wanted = unpack_reference(packed), weight.dequantize()
    assert (ours - wanted).abs().max() <= 2.0**-22 * wanted.abs().max()


def test_a_missing_bias_counts_as_zeros_beside_another_parts_bias() -> None:
    one, two = make_weight(3, 16), make_weight(2, 16, seed=1)
    packed = pack_reference([attrs.evolve(one, bias=torch.tensor([1.0, 2.0, 3.0])), two])
    assert packed.bias is not None
    assert packed.bias.tolist() == [1.0, 2.0, 3.0] + [0.0] * 13
    assert pack_reference([one, two]).bias is None


def test_parts_that_do_not_fit_are_refused() -> None:
    one, two = make_weight(8, 32), make_weight(8, 48)
    with pytest.raises(RequestError, match="share K and device"):
        pack_reference([one, two])
    with pytest.raises(RequestError, match="two matrices of one shape"):
        pack_reference([one, make_weight(9, 32)], paired=True)
    with pytest.raises(RequestError, match="nothing to pack"):
        pack_reference([])
    with pytest.raises(RequestError, match="one pre_scale"):
        pack_reference([one, attrs.evolve(one, pre_scale=torch.ones(32))])
    with pytest.raises(RequestError, match="on a CUDA device"):
        pack([one])
