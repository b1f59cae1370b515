"""What every packed matrix has, whatever the format of its weights, and what its kernels are compiled from."""

from __future__ import annotations

from typing import Protocol

import attrs
from torch import Tensor


@attrs.frozen(kw_only=True)
class PackedFormat:
    """A packed layout of blocks of 16 rows x 128 columns.

    block_bytes: of a block, a multiple of 16. stream: source and function of the kernel that multiplies a few tokens;
    widen: of the one that writes rows in 16 bits; segments: of the one by warpgroup products with the sums of `stream`,
    None where there is none. defines: macros that all are compiled with, beyond their own.
    most_tokens: of a call that streams, in one launch or several.
    """

    block_bytes: int
    stream: tuple[str, str]
    widen: tuple[str, str]
    segments: tuple[str, str] | None = None
    defines: tuple[tuple[str, int], ...] = ()
    most_tokens: int = 32


def bytes_of(*tensors: Tensor | None) -> int:
    """Of all those that there are."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PackedMatrix(Protocol):
    """One matrix [N, K] on a CUDA device: y = row_scale * (x @ what blocks hold, transposed) + bias.

    blocks: [ceil(N / 16), ceil(K / 128), format.block_bytes] uint8. row_scale: [16 * ceil(N / 16)] float32.
    paired: rows 16 i .. 16 i + 7 are rows 8 i .. of a first matrix (gate), the next 8 those of a second one (up);
    N counts both. bias: [16 * ceil(N / 16)] float32 or None. pre_scale: [K] float32, multiplies x, or None.
    """

    @property
    def blocks(self) -> Tensor: ...
    @property
    def row_scale(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def paired(self) -> bool: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def pre_scale(self) -> Tensor | None: ...
    @property
    def format(self) -> PackedFormat: ...
