"""What a safetensors header says of a tensor, and the dtypes such headers may name."""

from __future__ import annotations

from math import prod

import attrs

# Bits per element by the dtype names of the safetensors format (safetensors 0.8, Dtype).
# F4 and the F6 forms count logical elements, so their byte size is bits * elements / 8.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}


@attrs.frozen(kw_only=True, slots=True)
class TensorInfo:
    """One tensor as its shard's header describes it; no weight byte has been read.

    name: full name in the checkpoint.
    dtype: safetensors dtype name, one of `DTYPE_BITS`, or an unknown name kept as written.
    shape: logical shape; for F4 it counts elements, not bytes.
    file: shard file name, relative to the snapshot directory.
    begin, end: absolute byte offsets in that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.end - self.begin

    def describe(self) -> str:
        """Dtype and shape as messages show them, for example `F8_E4M3 [32, 64]`."""
        return f"{self.dtype} {list(self.shape)}"


def expected_nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes that dtype and shape imply, rounded up to a whole byte; None for an unknown dtype."""
    bits = DTYPE_BITS.get(dtype)
    return None if bits is None else (bits * prod(shape) + 7) // 8
