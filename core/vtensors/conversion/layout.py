"""The files of the output before a byte is written: tensors packed into shards, exact headers and sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

import attrs

from vtensors.shard_files import INDEX_NAME, SINGLE_NAME
from vtensors.tensors import DTYPE_BITS, expected_nbytes

GIGABYTE = 1_000_000_000
# As transformers and the publishers' tools write it; some loaders refuse a file without it.
_METADATA = {"format": "pt"}


@attrs.frozen(kw_only=True, slots=True)
class PlannedTensor:
    """One tensor of the output. role: which part of its weight it holds. change: as in `OutputTensor`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    change: Callable[[bytes], bytes] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        size = expected_nbytes(self.dtype, self.shape)
        return 0 if size is None else size


@attrs.frozen(kw_only=True)
class PlannedShard:
    """One file. units: indices of the units (modules) that it holds. offsets: tensor name -> place in the file.

    header: 8 length bytes and the JSON. size: bytes of the whole file.
    """

    file: str
    units: tuple[int, ...]
    tensors: tuple[PlannedTensor, ...]
    header: bytes
    offsets: dict[str, int]
    size: int


def pack_shards(units: Sequence[Sequence[PlannedTensor]], max_bytes: int) -> tuple[PlannedShard, ...]:
    """Shards in the order of the units; a unit is never divided, so one that is larger has a file of its own.

    max_bytes: of tensor data per file. One shard is called `model.safetensors`, several have an index.
    """
    groups: list[list[int]] = [[]]
    filled = 0
    for number, unit in enumerate(units):
        size = sum(tensor.nbytes for tensor in unit)
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size
    total = len(groups)
    return tuple(
        _shard(
            SINGLE_NAME if total == 1 else f"model-{place:05d}-of-{total:05d}.safetensors",
            group,
            [tensor for number in group for tensor in units[number]],
        )
        for place, group in enumerate(groups, 1)
    )


def _shard(file: str, units: Sequence[int], tensors: Iterable[PlannedTensor]) -> PlannedShard:
    # Wide elements first, as safetensors itself writes: every tensor is then aligned to its element size.
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    entries: dict[str, object] = {"__metadata__": _METADATA}
    position = 0
    for tensor in ordered:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets, place = {}, len(header)
    for tensor in ordered:
        offsets[tensor.name] = place
        place += tensor.nbytes
    return PlannedShard(
        file=file, units=tuple(units), tensors=tuple(ordered), header=header, offsets=offsets, size=place
    )


def index_file(shards: Sequence[PlannedShard]) -> tuple[str, bytes] | None:
    """(name, content) of the index, None for a single file."""
    if len(shards) == 1:
        return None
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return INDEX_NAME, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
