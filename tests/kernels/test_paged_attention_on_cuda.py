"""Paged attention on a CUDA device: the shapes of real models, rows bit for bit at any batch, graphs, prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvfp4_cuda_cases import replayed
from paged_attention_emulated import assert_only_rounded, attention_of, attention_shape
from vtensors_kernels.reference.paged_attention import AttentionShape
from vtensors_kernels.steps.paged_attention import PagedAttention
from vtensors_kernels.steps.paged_attention_probe import (
    DECODE_LIMITS,
    PREFILL_LIMITS,
    PagedCase,
    probe_paged_attention,
    relative_errors,
)

pytestmark = pytest.mark.gpu

CUDA = "cuda:0"
EXACT_SCALES, SCALES = (0.25, 0.5), (0.031, 0.017)
# Qwen3.6 27B and 35B-A3B, a Llama, more heads than one block takes, and the small shapes of tests.
SHAPES: list[dict[str, Any]] = [
    {"heads": 24, "kv_heads": 4, "dim": 256},
    {"heads": 24, "kv_heads": 4, "dim": 256, "kv_scales": EXACT_SCALES},
    {"heads": 16, "kv_heads": 2, "dim": 256, "dtype": torch.float16},
    {"heads": 32, "kv_heads": 8, "dim": 128, "rotary": 128, "gated": False, "normed": False},
    {"heads": 64, "kv_heads": 4, "dim": 128, "rotary": 128, "gated": False, "kv_scales": EXACT_SCALES},
    {"heads": 12, "kv_heads": 1, "dim": 64, "rotary": 0, "dtype": torch.float16, "kv_scales": EXACT_SCALES},
    {"heads": 4, "kv_heads": 2, "dim": 32},
]
OLD = (0, 1, 62, 63, 64, 65, 127, 128, 300, 511, 512, 1023, 1100, 2049, 4095, 5000)


def _name(shape: dict[str, Any]) -> str:
    return " ".join(str(value) for value in shape.values())


def _made(
    arguments: dict[str, Any], *, positions: int = 8192, decode: bool = False
) -> tuple[AttentionShape, PagedAttention]:
    shape = attention_shape(**arguments, device=CUDA)
    return shape, attention_of(shape, max_positions=positions, device=CUDA, decode=decode)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("arguments", SHAPES, ids=_name)
def test_a_new_token_attends_to_those_before_it(arguments: dict[str, Any], decode: bool) -> None:
    shape, attention = _made(arguments, decode=decode)
    case = PagedCase.make(shape, OLD, attention.device)
    found, wanted = case.decode(attention), case.wanted()
    errors = relative_errors(found, wanted)
    print(errors)
    assert errors["result"] < DECODE_LIMITS[shape.dtype]
    assert_only_rounded(found[0], wanted[0])
    # Single elements may round the other way where the norm's sum differs in its last bit.
    assert max(errors["keys"], errors["values"]) < 1e-4


@pytest.mark.parametrize("arguments", SHAPES, ids=_name)
def test_a_row_is_the_same_bits_at_any_batch_and_place(arguments: dict[str, Any]) -> None:
    shape, attention = _made(arguments)
    case = PagedCase.make(shape, (*OLD, *OLD[::-1]), attention.device)
    found = case.decode(attention)[0]
    assert torch.isfinite(found).all()
    for batch in (1, 2, 3, 8, 16, 31):
        for first in range(0, 32 - batch + 1, batch):
            rows = slice(first, first + batch)
            assert torch.equal(case.decode(attention, rows)[0], found[rows]), (batch, first)
    # Another grid, the same bits.
    other = attention_of(shape, max_positions=128, device=CUDA)
    assert torch.equal(case.decode(other)[0], found)


@pytest.mark.parametrize("arguments", [shape for shape in SHAPES if "kv_scales" not in shape], ids=_name)
def test_both_kernels_give_the_same_bits_at_any_batch(arguments: dict[str, Any]) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this device has no bulk copies")
    shape, other = _made(arguments, decode=True)
    attention = attention_of(shape, max_positions=8192, device=CUDA, stream=True)
    case = PagedCase.make(shape, OLD * 4, attention.device)
    for batch in (1, 2, 4, 8, 16, 24, 32, 48, 64):
        rows = slice(64 - batch, 64)
        for own, wanted in zip(case.decode(attention, rows), case.decode(other, rows), strict=True):
            assert torch.equal(own.view(torch.int16), wanted.view(torch.int16)), batch
    # Warps that take many splits, one after the other.
    few = attention_of(shape, device=CUDA, max_positions=8192, stream=True, blocks=1)
    assert torch.equal(case.decode(few)[0], case.decode(other)[0])


@pytest.mark.parametrize("arguments", [SHAPES[0], SHAPES[1]], ids=_name)
def test_a_long_row_is_the_same_bits_among_short_ones(arguments: dict[str, Any]) -> None:
    shape, attention = _made(arguments, positions=65_536)
    _, other = _made(arguments, positions=65_536, decode=True)
    case = PagedCase.make(shape, (40_000, 5, 8200), attention.device)
    found = case.decode(attention)[0]
    assert torch.equal(case.decode(other)[0], found)
    assert_only_rounded(found, case.wanted()[0])
    for row in range(3):
        assert torch.equal(case.decode(attention, slice(row, row + 1))[0], found[row : row + 1])


@pytest.mark.parametrize("arguments", [SHAPES[0], SHAPES[1]], ids=_name)
def test_a_captured_step_gives_the_same_bits_a_hundred_times(arguments: dict[str, Any]) -> None:
    shape, attention = _made(arguments)
    case = PagedCase.make(shape, OLD, attention.device)
    found = case.decode(attention)[0]
    pages = (case.k_pages, case.v_pages, case.page_table)

    def step() -> torch.Tensor:
        return attention.decode(case.q, case.k, case.v, *pages, case.positions, case.cos_sin)

    for again in replayed(step):
        assert torch.equal(again, found)


def test_padding_rows_are_harmless() -> None:
    shape, attention = _made(SHAPES[0])
    case = PagedCase.make(shape, (700, 0, 300, 0, 64), attention.device)
    alone = [case.decode(attention, slice(row, row + 1))[0] for row in (0, 2, 4)]
    case.page_table[1::2] = 0
    out, k_pages, _ = case.decode(attention)
    assert torch.equal(out[::2], torch.cat(alone))
    assert k_pages[0, :, 1:].isnan().all()


@pytest.mark.parametrize("kv_scales", [None, SCALES])
@pytest.mark.parametrize(("start", "new"), [(0, 1), (0, 300), (100, 157), (1000, 1), (513, 1024)])
@pytest.mark.parametrize("arguments", [SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[6]], ids=_name)
def test_a_chunk_attends_to_what_was_before_it(
    arguments: dict[str, Any], start: int, new: int, kv_scales: tuple[float, float] | None
) -> None:
    shape, attention = _made({**arguments, "kv_scales": kv_scales})
    case = PagedCase.make(shape, (start,), attention.device, new=new)
    found = case.prefill(attention)
    errors = relative_errors(found, case.wanted())
    print(errors)
    assert errors["result"] < PREFILL_LIMITS[shape.dtype]
    assert max(errors["keys"], errors["values"]) < 1e-3
    assert torch.equal(case.prefill(attention)[0], found[0])


@pytest.mark.parametrize("dim", [256, 128])
def test_a_long_chunk_makes_no_matrix_of_scores(dim: int) -> None:
    shape, attention = _made({"heads": 24, "kv_heads": 4, "dim": dim})
    new, old = 2048, 6000
    case = PagedCase.make(shape, (old,), attention.device, new=new)
    pages = (case.k_pages, case.v_pages, case.page_table)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.prefill(case.q, case.k, case.v, *pages, old, case.cos_sin)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    # Turned queries, attention's result, the gated result; keys and values; the sums of the softmax.
    floor = 3 * new * 24 * dim * 2 + 2 * 4 * (old + new) * dim * 2 + 24 * new * 4
    print(f"{used / 1e6:.0f} MB used, {floor / 1e6:.0f} MB are results")
    assert used < 1.3 * floor


def test_decode_and_prefill_write_the_same_pages() -> None:
    shape, attention = _made({**SHAPES[0], "kv_scales": SCALES})
    case = PagedCase.make(shape, (66,), attention.device)
    for one, other in zip(case.decode(attention)[1:], case.prefill(attention)[1:], strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("arguments", [SHAPES[0], SHAPES[3], {**SHAPES[2], "kv_scales": SCALES}], ids=_name)
def test_the_self_test_passes(arguments: dict[str, Any]) -> None:
    probe_paged_attention(_made(arguments)[1])
