"""Shards before a byte is written: order, alignment, exact headers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtensors.conversion.layout import PlannedTensor, index_file, pack_shards
from vtensors.header import parse_header
from vtensors.tensors import DTYPE_BITS

DTYPES = ("U8", "F8_E4M3", "BF16", "F32", "I64")
TENSOR = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3))
UNITS = st.lists(st.lists(TENSOR, min_size=1, max_size=4), min_size=1, max_size=8)


def _units(shapes: list[list[tuple[str, list[int]]]]) -> list[list[PlannedTensor]]:
    return [
        [
            PlannedTensor(name=f"m{number}.t{place}é", dtype=dtype, shape=tuple(shape), role="codes")
            for place, (dtype, shape) in enumerate(unit)
        ]
        for number, unit in enumerate(shapes)
    ]


@given(UNITS, st.integers(1, 200))
def test_headers_are_valid_and_every_tensor_is_aligned(
    shapes: list[list[tuple[str, list[int]]]], limit: int
) -> None:
    units = _units(shapes)
    shards = pack_shards(units, limit)
    seen = {}
    for shard in shards:
        parsed = parse_header(shard.file, shard.header + bytes(shard.size - len(shard.header)), shard.size)
        for info in parsed.tensors:
            assert shard.offsets[info.name] == info.begin
            assert info.begin % (DTYPE_BITS[info.dtype] // 8) == 0 or info.nbytes == 0
            seen[info.name] = (info.dtype, info.shape)
        data = shard.size - len(shard.header)
        assert data <= limit or len(shard.units) == 1 or _nonempty(units, shard.units) == 1
    assert seen == {tensor.name: (tensor.dtype, tensor.shape) for unit in units for tensor in unit}
    assert [number for shard in shards for number in shard.units] == list(range(len(units)))


def _nonempty(units: list[list[PlannedTensor]], numbers: tuple[int, ...]) -> int:
    return sum(any(tensor.nbytes for tensor in units[number]) for number in numbers)


@pytest.mark.parametrize(("limit", "files"), [(10**9, 1), (8, 2)])
def test_only_several_files_have_an_index(limit: int, files: int) -> None:
    shards = pack_shards(_units([[("F32", [2])], [("F32", [])]]), limit)
    index = index_file(shards)
    assert len(shards) == files
    if files == 1:
        assert index is None
        return
    assert index is not None
    content = json.loads(index[1])
    assert content["metadata"] == {"total_size": 12}
    assert set(content["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
