"""paged_attention_stream on the CPU emulator has paged_attention_decode's bits; which of them a device is given."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from emulation.emulator import emulate, needs_compiler
from paged_attention_emulated import attention_of, attention_shape, emulate_attention
from vtensors_kernels.compiling.architectures import COMPILED, PORTABLE, SHARED_KIB, TARGETS
from vtensors_kernels.compiling.instantiations import FEATURES
from vtensors_kernels.steps.paged_attention import FINE_TOKENS, INSTANTIATIONS, PagedAttention
from vtensors_kernels.steps.paged_attention_forms import (
    BLOCKS,
    DECODE,
    HEAD_DIMS,
    STREAM,
    WARPS,
    choose_form,
    decode_form,
    stream_form,
)
from vtensors_kernels.steps.paged_attention_probe import PagedCase

CPU = torch.device("cpu")
HALF = {"VT_F16": 0}
# The ends of tiles of 16 tokens and of pages of 64.
ENDS = (0, 1, 14, 15, 16, 17, 31, 32, 47, 48, 49, 62, 63, 64, 65, 79, 80, 126, 127, 128, 130)
# Splits of one page and of two, more of them than a block has warps.
LONG = (700, 2047, 2300)
SHAPES: list[dict[str, Any]] = [
    {"heads": 6, "kv_heads": 1, "dim": 32},
    {"heads": 20, "kv_heads": 2, "dim": 64, "rotary": 64, "gated": False, "normed": False},
    {"heads": 5, "kv_heads": 1, "dim": 128, "dtype": torch.float16, "rotary": 0},
    {"heads": 6, "kv_heads": 1, "dim": 256},
]


def _name(shape: dict[str, Any]) -> str:
    return " ".join(str(value) for value in shape.values())


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch)


emulated = pytest.mark.usefixtures("_emulated")


def _with_slots(attention: PagedAttention, slots: int) -> PagedAttention:
    """The same with another ring; shared memory for the longest."""
    form, shape = attention.form, attention.shape
    assert form.source == STREAM
    other = attrs.evolve(form, defines={**form.defines, "VT_SLOTS": slots}, shared_bytes=220_000)
    fields = {field.name: getattr(shape, field.name) for field in attrs.fields(type(shape))}
    return PagedAttention(**fields, max_positions=4096, device=CPU, form=other)


@needs_compiler
@emulated
@pytest.mark.parametrize("blocks", [1, 200, 10_000])
@pytest.mark.parametrize("arguments", SHAPES, ids=_name)
def test_both_kernels_give_the_same_bits_and_write_the_same_pages(
    arguments: dict[str, Any], blocks: int
) -> None:
    shape = attention_shape(**arguments)
    case = PagedCase.make(shape, ENDS if shape.head_dim == 256 else ENDS + LONG, CPU)
    stream, decode = attention_of(shape, blocks=blocks, stream=True), attention_of(shape, decode=True)
    assert (stream.form.source, decode.form.source) == (STREAM, DECODE)
    for own, other in zip(case.decode(stream), case.decode(decode), strict=True):
        assert torch.equal(own.view(torch.int16), other.view(torch.int16))


@needs_compiler
@emulated
@pytest.mark.parametrize("slots", [1, 2, 5, 8])
def test_rings_of_any_length_give_the_same_bits(slots: int) -> None:
    shape = attention_shape(6, 1, 32)
    attention = attention_of(shape, stream=True)
    case = PagedCase.make(shape, ENDS + LONG, CPU)
    assert torch.equal(case.decode(_with_slots(attention, slots))[0], case.decode(attention)[0])


@needs_compiler
@emulated
def test_a_padding_row_reads_and_writes_its_first_token_alone() -> None:
    shape = attention_shape(6, 1, 32)
    case = PagedCase.make(shape, (100, 0, 30, 0), CPU)
    case.page_table[1::2] = 0
    out, k_pages, v_pages = case.decode(attention_of(shape, stream=True))
    wanted = case.decode(attention_of(shape, decode=True))[0]
    assert torch.equal(out, wanted)
    assert torch.isfinite(out).all()
    for pages in (k_pages, v_pages):
        assert pages[0, :, 1:].isnan().all()


@needs_compiler
@emulated
def test_an_infinite_or_undefined_old_value_reaches_its_own_row_alone() -> None:
    shape = attention_shape(6, 1, 32)
    case = PagedCase.make(shape, (100, 130), CPU)
    clean = case.decode(attention_of(shape, stream=True))[0]
    case.v_pages[case.page_table[0, 0], 0, 3] = float("inf")
    case.v_pages[case.page_table[0, 1], 0, 3] = float("nan")
    out = case.decode(attention_of(shape, stream=True))[0]
    assert not torch.isfinite(out[0]).any()
    assert torch.equal(out[1], clean[1])


@needs_compiler
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("fine", [1, FINE_TOKENS])  # splits of two pages, and of one
@pytest.mark.parametrize("position", [0, 5, 15, 16, 20, 63, 64, 69, 84])
def test_no_token_behind_the_new_one_is_read(position: int, fine: int, fp8: bool) -> None:
    # Memory ends with the new token's place; what follows faults.
    form = decode_form(HALF, 32, True) if fp8 else stream_form("sm_90a", HALF, 32)
    assert form is not None
    made = torch.Generator().manual_seed(position)
    q, k, v = (torch.randn(32, generator=made).to(torch.bfloat16) for _ in range(3))
    caches = [
        torch.zeros((position + 1) * 32, dtype=torch.uint8 if fp8 else torch.bfloat16) for _ in range(2)
    ]
    table, positions = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([position], dtype=torch.int32)
    sums, tops = torch.zeros(2 * 32), torch.zeros(2 * 2)
    addresses = [q, k, v, *caches, table, positions, None, None, None, torch.zeros_like(q), sums, tops]
    numbers = [1e-6, 1.0, 1.0, 1.0, 32, 32, 32, 2, 1, 1, 32, 0, fine, 2]
    arguments = [*addresses, *numbers]
    emulate(
        form.source,
        form.function,
        form.defines,
        (2, 1, 1),
        (32 * WARPS, 1, 1),
        arguments,
        shared_bytes=form.shared_bytes,
    )
    if not fp8:
        assert torch.equal(caches[0][-32:], k)
        assert torch.equal(caches[1][-32:], v)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_targets_with_bulk_copies_stream_large_heads_of_16_bits(dim: int) -> None:
    for target in (*TARGETS.values(), PORTABLE):
        form = choose_form(target, HALF, dim, False)
        assert form.source == (STREAM if dim == 256 and target in FEATURES["bulk_copy"] else DECODE)
        if form.source == STREAM:
            assert form.blocks_per_sm is not None
            assert form.blocks_per_sm * (form.shared_bytes + 1024) <= (SHARED_KIB[target] + 1) * 1024
            assert form.blocks(132) == form.blocks_per_sm * 132
        assert choose_form(target, HALF, dim, True).source == DECODE
        assert choose_form(target, HALF, dim, True).blocks(132) == BLOCKS


def test_an_sm_has_as_many_blocks_as_shared_memory_allows() -> None:
    found = {}
    for target in ("sm_90a", "sm_120a"):
        forms = [stream_form(target, HALF, dim) for dim in HEAD_DIMS]
        found[target] = [form.blocks_per_sm for form in forms if form is not None]
    assert found == {"sm_90a": [2, 2, 2, 2], "sm_120a": [2, 2, 2, 1]}


def test_every_form_that_may_be_chosen_is_compiled_for_its_target() -> None:
    for target in COMPILED:
        for dim in HEAD_DIMS:
            for fp8 in (False, True):
                form = choose_form(target, HALF, dim, fp8)
                (one,) = [
                    own
                    for own in INSTANTIATIONS
                    if own.source == form.source and own.defines == form.defines and target in own.targets
                ]
                assert one.hot
                assert one.shared_bytes == form.shared_bytes
                assert "mma" in one.expects
                assert ("bulk_copy" in one.expects) == (form.source == STREAM)
