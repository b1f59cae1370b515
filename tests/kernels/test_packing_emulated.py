"""Packing and row gathering on a CPU: what the launchers pass to their kernels, run in the emulator, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from emulated_launches import EmulatedFunction, EmulatedLaunch
from emulation.emulator import needs_compiler
from fp8_cases import make_fp8
from vtensors_formats import NVFP4Weight
from vtensors_formats.plain import PlainWeight
from vtensors_kernels import packing, row_gather
from vtensors_kernels.fp8 import repack as fp8_repack
from vtensors_kernels.nvfp4 import repack
from vtensors_kernels.packed_tiles import TILE_ROWS, column_steps, row_tiles
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference
from vtensors_kernels.reference.nvfp4_packing import pack_reference

pytestmark = needs_compiler


def _compiled(source: str, name: str, _index: int, defines: dict[str, int]) -> EmulatedFunction:
    return EmulatedFunction(source=source, name=name, defines=tuple(sorted(defines.items())))


def _many(wanted: Sequence[Any], _index: int) -> list[EmulatedFunction]:
    return [_compiled(one.source, one.name, 0, dict(one.defines)) for one in wanted]


def _poisoned(n: int, k: int, block_bytes: int, _device: torch.device) -> torch.Tensor:
    blocks = torch.full((row_tiles(n), column_steps(k), block_bytes), 0xAA, dtype=torch.uint8)
    if n % TILE_ROWS:
        blocks[-1].zero_()
    return blocks


@pytest.fixture(autouse=True)
def _on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packing, row_gather):
        monkeypatch.setattr(module, "Launch", EmulatedLaunch)
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
    monkeypatch.setattr(packing, "compiled_function", _compiled)
    monkeypatch.setattr(row_gather, "compile_many", _many)
    for module in (repack, fp8_repack):
        monkeypatch.setattr(module, "empty_blocks", _poisoned)


def _nvfp4(n: int, k: int, *, group: int = 16, divisor: bool = False, bias: bool = False) -> NVFP4Weight:
    source = torch.Generator().manual_seed(n * 7919 + k)
    scales = torch.randint(0, 127, (n, k // group), generator=source, dtype=torch.uint8)
    scale = torch.rand((n, 1), generator=source) * 1e-2 + 1e-3
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=scales.view(torch.float8_e4m3fn),
        global_scale=None if divisor else scale,
        global_divisor=1 / scale if divisor else None,
        bias=torch.randn(n, generator=source) if bias else None,
        pre_scale=torch.linspace(0.5, 2, k).bfloat16(),
    )


def _check(ours: Any, wanted: Any) -> None:
    for field in ("blocks", "row_scale", "bias", "pre_scale"):
        one, other = getattr(ours, field), getattr(wanted, field)
        assert (one is None) == (other is None), field
        assert one is None or torch.equal(one, other), field
    held = (ours.blocks, ours.row_scale, ours.bias, ours.pre_scale)
    assert ours.nbytes == sum(tensor.nbytes for tensor in held if tensor is not None)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("rows", "k", "group"), [((24, 13), 144, 16), ((40, 7, 16), 288, 32)])
def test_nvfp4_parts_are_packed_as_the_reference_packs_them(
    rows: tuple[int, ...], k: int, group: int, paired: bool
) -> None:
    if paired:
        rows = (rows[0] + 5,) * 2
    parts = [_nvfp4(n, k, group=group, divisor=i == 1, bias=i == 0) for i, n in enumerate(rows)]
    _check(repack.pack(parts, paired=paired), pack_reference(parts, paired=paired))


@pytest.mark.parametrize("kind", ["tensor", "row", "block", "mx"])
@pytest.mark.parametrize("paired", [False, True])
def test_fp8_parts_are_packed_as_the_reference_packs_them(kind: str, paired: bool) -> None:
    rows = (24, 24) if paired else (20, 13)
    parts = [make_fp8(kind, n, 160, seed=i) for i, n in enumerate(rows)]
    _check(fp8_repack.pack_fp8(parts, paired=paired), pack_fp8_reference(parts, paired=paired))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divisor", [False, True])
def test_rows_of_an_nvfp4_embedding_are_the_references(divisor: bool, dtype: torch.dtype) -> None:
    weight = attrs.evolve(_nvfp4(11, 2080, divisor=divisor), pre_scale=None)
    stored = weight.global_divisor if divisor else weight.global_scale
    assert stored is not None
    gather = row_gather.RowGather(
        ("common/embedding_nvfp4.cu", "embedding_nvfp4"),
        (("VT_DIVISOR", int(divisor)),),
        weight.shape,
        (weight.codes, weight.block_scale, stored),
        (16, 1),
        columns=16,
    )
    for ids in (torch.tensor([10, 0, 3]), torch.arange(70) % 11):
        out = torch.full((len(ids), 2080), float("nan"), dtype=dtype)
        assert gather(ids, dtype, out=out) is out
        assert torch.equal(out.view(torch.int16), embedding(ids, weight, dtype).view(torch.int16))


def test_rows_of_a_plain_embedding_are_the_references() -> None:
    weight = PlainWeight(tensor=torch.randn(9, 72, generator=torch.Generator().manual_seed(0)))
    gather = row_gather.RowGather(
        ("common/embedding_rows.cu", "embedding_rows"),
        (("VT_WEIGHT", 2),),
        (9, 72),
        (weight.tensor,),
        columns=8,
    )
    ids = torch.tensor([8, 0, 0])
    assert torch.equal(gather(ids, torch.float16), embedding(ids, weight, torch.float16))
    assert gather(ids[:0], torch.bfloat16).shape == (0, 72)
