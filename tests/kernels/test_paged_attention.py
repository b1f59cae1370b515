"""Paged attention on the CPU emulator: decode and prefill against the reference, page edges, dirty pages, padding."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from emulation.emulator import emulate, needs_compiler
from paged_attention_emulated import assert_only_rounded, attention_of, attention_shape, emulate_attention
from vtensors.errors import RequestError, VtensorsError
from vtensors_formats import e4m3
from vtensors_kernels.compiling.sources import Source, load_source
from vtensors_kernels.reference.paged_attention import paged_attention
from vtensors_kernels.steps import paged_attention_probe
from vtensors_kernels.steps.paged_attention import (
    COMBINE,
    FINE_TOKENS,
    MOST_SPLITS,
    PagedAttention,
    splits_of,
)
from vtensors_kernels.steps.paged_attention_probe import (
    DECODE_LIMITS,
    PREFILL_LIMITS,
    PagedCase,
    probe_paged_attention,
    relative_errors,
)

CPU = torch.device("cpu")
EDGES = (0, 1, 62, 63, 64, 65, 127, 128)
# Scales that are powers of two: the reference's rounding of what the cache gives back loses nothing.
EXACT_SCALES = (0.25, 0.5)
SHAPES: list[dict[str, Any]] = [  # caches of 16 bits are the stream's
    {"heads": 4, "kv_heads": 2, "dim": 32},
    {"heads": 6, "kv_heads": 1, "dim": 32, "kv_scales": EXACT_SCALES, "gated": False},
    {"heads": 2, "kv_heads": 2, "dim": 64, "rotary": 64, "normed": False, "dtype": torch.float16},
    {"heads": 8, "kv_heads": 1, "dim": 64, "kv_scales": EXACT_SCALES, "rotary": 22},
    {"heads": 12, "kv_heads": 1, "dim": 128, "rotary": 0},
    {"heads": 4, "kv_heads": 2, "dim": 128, "kv_scales": EXACT_SCALES, "dtype": torch.float16},
    {"heads": 6, "kv_heads": 1, "dim": 256},
    {"heads": 3, "kv_heads": 1, "dim": 256, "kv_scales": EXACT_SCALES},
]


def _name(shape: dict[str, Any]) -> str:
    return " ".join(str(value) for value in shape.values())


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_attention(monkeypatch)


emulated = pytest.mark.usefixtures("_emulated")


@needs_compiler
@emulated
@pytest.mark.parametrize("arguments", SHAPES, ids=_name)
def test_a_new_token_attends_to_those_before_it_at_every_edge_of_a_page(arguments: dict[str, Any]) -> None:
    shape = attention_shape(**arguments)
    case = PagedCase.make(shape, EDGES, CPU)
    found, wanted = case.decode(attention_of(shape)), case.wanted()
    errors = relative_errors(found, wanted)
    assert errors["result"] < DECODE_LIMITS[shape.dtype]
    assert errors["keys"] == errors["values"] == 0
    assert_only_rounded(found[0], wanted[0])


@needs_compiler
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_a_device_without_bulk_copies_has_the_other_kernel_for_any_cache(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_attention(monkeypatch, target)
    shape = attention_shape(6, 1, 256)
    attention = attention_of(shape)
    assert attention.form.function == (
        "paged_attention_stream" if target == "sm_90a" else "paged_attention_decode"
    )
    case = PagedCase.make(shape, EDGES, CPU)
    assert_only_rounded(case.decode(attention)[0], case.wanted()[0])


@needs_compiler
@emulated
@pytest.mark.parametrize("kv_scales", [None, EXACT_SCALES])
def test_long_rows_are_split_and_combined(kv_scales: tuple[float, float] | None) -> None:
    shape = attention_shape(4, 2, 32, kv_scales=kv_scales)
    old = (FINE_TOKENS - 1, FINE_TOKENS, 5000, 8500)
    assert [splits_of(count + 1) for count in old] == [32, 17, 40, 45]
    case = PagedCase.make(shape, old, CPU)
    assert_only_rounded(case.decode(attention_of(shape, max_positions=9000))[0], case.wanted()[0])


@needs_compiler
@emulated
@pytest.mark.parametrize("kv_scales", [None, (0.031, 0.017)])
def test_a_row_is_the_same_bits_whatever_its_neighbours_and_the_grid(
    kv_scales: tuple[float, float] | None,
) -> None:
    shape = attention_shape(6, 1, 32, kv_scales=kv_scales)
    case = PagedCase.make(shape, (700, 3, 64, 1100), CPU)
    found = case.decode(attention_of(shape))[0]
    for positions in (64, 128, 320, 4096):  # 1, 2, 5 and 64 splits at a time
        attention = attention_of(shape, max_positions=positions)
        for row in range(4):
            assert torch.equal(case.decode(attention, slice(row, row + 1))[0], found[row : row + 1])
        assert torch.equal(case.decode(attention, slice(1, 4))[0], found[1:])


@needs_compiler
@emulated
@pytest.mark.parametrize("arguments", [SHAPES[2], SHAPES[3], SHAPES[4], SHAPES[6], SHAPES[7]], ids=_name)
def test_a_block_that_takes_many_pages_gives_the_bits_of_many_blocks(arguments: dict[str, Any]) -> None:
    shape = attention_shape(**arguments)
    case = PagedCase.make(shape, (300, FINE_TOKENS + 300), CPU)
    found = [case.decode(attention_of(shape, max_positions=positions))[0] for positions in (64, 192, 4096)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert_only_rounded(found[0], case.wanted()[0])


@needs_compiler
@emulated
def test_padding_rows_touch_the_dummy_page_alone() -> None:
    shape = attention_shape(4, 2, 32)
    case = PagedCase.make(shape, (100, 0, 30, 0), CPU)
    case.page_table[1::2] = 0
    out, k_pages, v_pages = case.decode(attention_of(shape))
    wanted, want_keys, want_values = case.wanted()
    assert torch.equal(out[::2], out[::2].nan_to_num())
    for found, expected in ((k_pages, want_keys), (v_pages, want_values)):
        assert torch.equal(found[1:].nan_to_num(), expected[1:].nan_to_num())
        assert found[0, :, 1:].isnan().all()
    assert_only_rounded(out[::2], wanted[::2])


@needs_compiler
@emulated
def test_codes_of_an_fp8_cache_are_those_of_the_reference_and_saturate() -> None:
    shape = attention_shape(2, 1, 32, kv_scales=(0.004, 0.013), rotary=0, normed=False)
    case = PagedCase.make(shape, (5, 9), CPU)
    case.v[0, :3] = torch.tensor([100.0, -100.0, 0.0001])
    found, wanted = case.decode(attention_of(shape)), case.wanted()
    for own, expected in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(e4m3.as_bytes(own), e4m3.as_bytes(expected))
    assert e4m3.decode(found[2][case.page_table[0, 0], 0, 5, :2]).tolist() == [448.0, -448.0]


@needs_compiler
@emulated
@pytest.mark.parametrize(("start", "new"), [(0, 1), (0, 70), (63, 2), (70, 75), (5, 1), (130, 62)])
@pytest.mark.parametrize("arguments", [SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[5]], ids=_name)
def test_a_chunk_attends_to_what_was_before_it_and_causally_to_itself(
    arguments: dict[str, Any], start: int, new: int
) -> None:
    shape = attention_shape(**arguments)
    case = PagedCase.make(shape, (start,), CPU, new=new)
    errors = relative_errors(case.prefill(attention_of(shape)), case.wanted())
    assert errors["result"] < PREFILL_LIMITS[shape.dtype]
    assert errors["keys"] == errors["values"] == 0


@needs_compiler
@emulated
def test_decode_writes_the_bytes_that_prefill_writes() -> None:
    shape = attention_shape(4, 2, 32, kv_scales=(0.031, 0.017))
    case = PagedCase.make(shape, (66,), CPU, new=1)
    attention = attention_of(shape)
    for one, other in zip(case.decode(attention)[1:], case.prefill(attention)[1:], strict=True):
        assert torch.equal(e4m3.as_bytes(one), e4m3.as_bytes(other))


@needs_compiler
@emulated
@pytest.mark.parametrize("arguments", [SHAPES[0], SHAPES[5]], ids=_name)
def test_the_self_test_passes_and_tells_a_wrong_kernel(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = attention_shape(**arguments)
    attention = attention_of(shape)
    probe_paged_attention(attention)
    other = attrs.evolve(shape, scale=shape.scale * 1.05)
    monkeypatch.setattr(
        paged_attention_probe,
        "paged_attention",
        lambda _shape, *rest: paged_attention(other, *rest),
    )
    with pytest.raises(VtensorsError, match=r"result of decode after"):
        probe_paged_attention(attention)


def test_the_reference_in_chunks_is_the_reference_at_once() -> None:
    shape = attention_shape(4, 2, 32)
    case = PagedCase.make(shape, (0,), CPU, new=150)
    wanted, k_pages, v_pages = case.wanted()
    parts = []
    for first, last in ((0, 70), (70, 71), (71, 150)):
        rows = [x[first:last] for x in (case.q, case.k, case.v)]
        pages = (case.k_pages, case.v_pages, case.page_table[0])
        parts.append(paged_attention(shape, *rows, *pages, first, case.cos_sin))
    assert torch.allclose(torch.cat(parts), wanted, atol=1e-6)
    assert torch.equal(case.k_pages.nan_to_num(), k_pages.nan_to_num())
    assert torch.equal(case.v_pages.nan_to_num(), v_pages.nan_to_num())


def test_no_sequence_has_more_splits_than_pages_or_than_a_warp_knows() -> None:
    for length in [*range(1, 1200), *range(1200, 300_000, 61), 262_144]:
        assert 1 <= splits_of(length) <= min(MOST_SPLITS, -(-length // 64))
    assert splits_of(64) == 1
    assert splits_of(65) == 2


@needs_compiler
@pytest.mark.parametrize("fine_tokens", [64, FINE_TOKENS, 1000])
def test_kernels_cut_a_sequence_as_their_twin_says(fine_tokens: int) -> None:
    kernel = """
    extern "C" __global__ void count_splits(const int* lengths, int* counts, int fine) {
      counts[threadIdx.x] = splits_of(lengths[threadIdx.x], fine).count;
    }
    """
    source = Source(name="count_splits.cu", text=load_source(COMBINE).text + kernel)
    lengths = [1, 64, 65, 128, 512, 1000, 1001, 2048, 2049, 4096, 4097, 8192, 8193, 100_000, 262_144]
    counts = torch.zeros(len(lengths), dtype=torch.int32)
    found = [torch.tensor(lengths, dtype=torch.int32), counts, fine_tokens]
    emulate(source, "count_splits", {}, (1,), (len(lengths),), found)
    assert counts.tolist() == [splits_of(length, fine_tokens) for length in lengths]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"), [(4, 3, 32, 8), (4, 2, 48, 8), (4, 2, 32, 7), (4, 2, 32, 34)]
)
@emulated
def test_shapes_without_a_kernel_are_refused(heads: int, kv_heads: int, dim: int, rotary: int) -> None:
    with pytest.raises(RequestError, match="no attention kernel has this shape"):
        attention_of(attention_shape(heads, kv_heads, dim, rotary=rotary))


@emulated
def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    shape = attention_shape(4, 2, 32)
    case, attention = PagedCase.make(shape, (3, 70), CPU), attention_of(shape)
    changes: list[tuple[str, torch.Tensor, str]] = [
        ("q", case.q[:, :-1], "rows of q do not fit"),
        ("k", case.k.float(), "rows of k do not fit"),
        ("v", case.v[:1], "v does not fit"),
        ("v", case.v.t().contiguous().t(), "rows of v do not fit"),
        ("k_pages", case.k_pages.half(), "k_pages does not fit"),
        ("v_pages", case.v_pages[..., :16], "v_pages does not fit"),
        ("page_table", case.page_table.long(), "page tables do not fit"),
        ("page_table", case.page_table[:1], "page_table does not fit"),
        ("positions", case.positions.long(), "positions do not fit"),
        ("cos_sin", case.cos_sin[:, :4], "cos_sin does not fit"),
    ]
    for name, tensor, told in changes:
        with pytest.raises(RequestError, match=told):
            _decode(attention, attrs.evolve(case, **{name: tensor}))
    with pytest.raises(RequestError, match="outside the sequence's pages"):
        attention.prefill(
            case.q, case.k, case.v, case.k_pages, case.v_pages, case.page_table[:1], 127, case.cos_sin
        )


def _decode(attention: PagedAttention, case: PagedCase) -> None:
    attention.decode(
        case.q, case.k, case.v, case.k_pages, case.v_pages, case.page_table, case.positions, case.cos_sin
    )
