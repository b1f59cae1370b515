"""Copies of small checkpoints with one thing changed, for the conformance kit.

Everything is held in memory and written anew, so this is for test checkpoints only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import attrs

from vtensors.header import read_header
from vtensors.tensors import TensorInfo, expected_nbytes

_INDEX = "model.safetensors.index.json"

# Little-endian bytes of one NaN by safetensors dtype (IEEE 754; OCP FP8 and MX v1.0 for the 8-bit ones).
NAN_BYTES: dict[str, bytes] = {
    "F64": bytes.fromhex("000000000000f87f"),
    "F32": bytes.fromhex("0000c07f"),
    "F16": bytes.fromhex("007e"),
    "BF16": bytes.fromhex("c07f"),
    "F8_E4M3": bytes.fromhex("7f"),
    "F8_E8M0": bytes.fromhex("ff"),
}


@attrs.frozen(kw_only=True)
class StoredTensor:
    """A tensor with its bytes. info.file is the shard; the offsets are those of the file it came from."""

    info: TensorInfo
    data: bytes


@attrs.frozen(kw_only=True)
class StoredCheckpoint:
    """All files of a checkpoint directory. tensors: by name; the other files are copied as they are."""

    directory: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The checkpoint in the directory, every `.safetensors` file of it. Raises CheckpointError."""
        tensors: dict[str, StoredTensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            raw = path.read_bytes()
            for info in read_header(path, path.name).tensors:
                tensors[info.name] = StoredTensor(info=info, data=raw[info.begin : info.end])
        return cls(directory=directory, tensors=tensors)

    def without(self, name: str) -> Self:
        """The checkpoint without one tensor."""
        return attrs.evolve(self, tensors={key: kept for key, kept in self.tensors.items() if key != name})

    def with_tensor(self, name: str, dtype: str, shape: tuple[int, ...], *, beside: str) -> Self:
        """The checkpoint with one more (or another) tensor of zeros, in the shard of the tensor `beside`."""
        info = attrs.evolve(self.tensors[beside].info, name=name, dtype=dtype, shape=shape)
        added = StoredTensor(info=info, data=bytes(expected_nbytes(dtype, shape) or 0))
        return attrs.evolve(self, tensors={**self.tensors, name: added})

    def with_nan(self, name: str) -> Self:
        """The checkpoint with NaN as the first element of one tensor, whose dtype is one of NAN_BYTES."""
        stored = self.tensors[name]
        nan = NAN_BYTES[stored.info.dtype]
        changed = attrs.evolve(stored, data=nan + stored.data[len(nan) :])
        return attrs.evolve(self, tensors={**self.tensors, name: changed})

    def save(self, directory: Path) -> Path:
        """Write the checkpoint into a new directory and return that; an index is made to fit."""
        shutil.copytree(self.directory, directory, ignore=shutil.ignore_patterns("*.safetensors"))
        shards: dict[str, list[StoredTensor]] = {}
        for stored in self.tensors.values():
            shards.setdefault(stored.info.file, []).append(stored)
        for file in {path.name for path in self.directory.glob("*.safetensors")}:
            (directory / file).write_bytes(_shard_bytes(shards.get(file, [])))
        if (directory / _INDEX).exists():
            index = json.loads((directory / _INDEX).read_text())
            index["weight_map"] = {name: stored.info.file for name, stored in self.tensors.items()}
            (directory / _INDEX).write_text(json.dumps(index))
        return directory


def _shard_bytes(tensors: list[StoredTensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for stored in tensors:
        end = begin + len(stored.data)
        shape = list(stored.info.shape)
        header[stored.info.name] = {"dtype": stored.info.dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    return len(blob).to_bytes(8, "little") + blob + b"".join(stored.data for stored in tensors)
