"""Bytes of the source's parts: always read, never mapped, so that a file cut short is an error, not a crash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from vtensors.conversion.parts import StoredPart
from vtensors.errors import RequestError
from vtensors.reading import TensorReader
from vtensors.tensor_source import stored_tensor
from vtensors.tensors import DTYPE_BITS, TensorInfo

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 8 << 20


def part_chunks(reader: TensorReader, part: StoredPart) -> Iterator[bytearray]:
    """The bytes of a part that is not transposed, at most CHUNK_BYTES at a time. Errors as `read_part`."""
    begin, end = part.begin - part.info.begin, part.end - part.info.begin
    for position in range(begin, end, CHUNK_BYTES):
        yield reader.read_part(part.info, position, min(position + CHUNK_BYTES, end))


def read_part(reader: TensorReader, part: StoredPart) -> bytearray:
    """The part's bytes in the order of its layout. Errors: CheckpointError as `TensorReader.read_part`."""
    data = reader.read_part(part.info, part.begin - part.info.begin, part.end - part.info.begin)
    return _turned(part, data) if part.transposed else data


@attrs.frozen
class PartSource:
    """A `TensorSource` that gives the parts of one claim, or of a window of its rows, read anew each time.

    parts: role -> StoredPart; `view` finds a part by the tensor that it is cut from.
    """

    reader: TensorReader
    parts: Mapping[str, StoredPart]

    def view(self, info: TensorInfo) -> torch.Tensor:
        """The part cut from the tensor, in memory of its own. Raises RequestError for another tensor."""
        for part in self.parts.values():
            if part.info is info:
                return stored_tensor(read_part(self.reader, part), info, part.layout.shape)
        raise RequestError("the tensor is not of this weight", file=info.file, tensor=info.name)


def _turned(part: StoredPart, data: bytearray) -> bytearray:
    """[rows, K] of an expert that is stored as [K, all rows]."""
    import torch

    size = DTYPE_BITS[part.layout.dtype] // 8
    rows, k = part.layout.shape
    begin, end = part.columns
    elements = torch.frombuffer(data, dtype=torch.uint8).view(k, -1, size)[:, begin:end]
    turned = bytearray(rows * k * size)
    torch.frombuffer(turned, dtype=torch.uint8).view(rows, k, size).copy_(elements.transpose(0, 1))
    return turned
