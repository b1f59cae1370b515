"""Stored bytes as torch tensors: zero-copy views of the memory map wherever alignment allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from vtensors.errors import CheckpointError
from vtensors.reading import TensorReader
from vtensors.tensors import DTYPE_BITS, TensorInfo

if TYPE_CHECKING:
    import torch

# safetensors dtype -> torch dtype name. E8M0 and F4 stay bytes: torch's own casts of them are numeric.
_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "uint8",
    "F4": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}


@attrs.frozen
class MappedTensors:
    """A `TensorSource` over one snapshot's reader."""

    reader: TensorReader

    def view(self, info: TensorInfo) -> torch.Tensor:
        """The tensor as stored: the header's dtype and shape; F4 as uint8 with half the last dimension.

        A view of the memory map where the offset fits the element size, else a copy. Writing to it never
        changes the file. Errors: CheckpointError for a dtype that torch does not have, or a changed file.
        """
        if info.dtype not in _TORCH or info.nbytes == 0:
            return stored_tensor(b"", info, info.shape)
        aligned = info.begin % max(1, DTYPE_BITS[info.dtype] // 8) == 0
        data = self.reader.bytes_view(info) if aligned else self.reader.read_copy(info)
        return stored_tensor(data, info, info.shape)


def stored_tensor(
    data: bytes | bytearray | memoryview, info: TensorInfo, shape: tuple[int, ...]
) -> torch.Tensor:
    """Stored bytes as a tensor of the header's dtype, sharing their memory; F4 as bytes, two per element.

    shape: logical, `info.shape` or that of the part that data holds. Errors: as `MappedTensors.view`.
    """
    import torch

    dtype, shape = _typed(info, shape)
    if len(data) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def typed_tensor(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The whole tensor's stored bytes, [nbytes] uint8 on any device, as `stored_tensor` gives them."""
    dtype, shape = _typed(info, info.shape)
    return data.view(dtype).reshape(shape)


def _typed(info: TensorInfo, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    import torch

    name = _TORCH.get(info.dtype)
    if name is None:
        raise CheckpointError(
            "the tensor's dtype cannot be read",
            file=info.file,
            tensor=info.name,
            seen=info.describe(),
            accepted=", ".join(_TORCH),
            fix="install a plugin for this number format, or export the checkpoint again",
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype, (*shape[:-1], shape[-1] // 2) if info.dtype == "F4" else shape
