"""The packed NVFP4 layout (`cuda/include/nvfp4_packed.cuh`): 16 x 128 blocks in the order that kernels read."""

from __future__ import annotations

import attrs
from torch import Tensor

from vtensors_kernels.packed_matrix import PackedFormat, bytes_of

LAYOUT = "nvfp4-packed"
# The same blocks with the rows of gate and up interleaved: what a SwiGLU reads, and nothing else.
PAIRED_LAYOUT = "nvfp4-packed-pairs"
BLOCK_BYTES = 1152
FORMAT = PackedFormat(
    block_bytes=BLOCK_BYTES,
    stream=("common/linear_nvfp4_stream.cu", "linear_nvfp4_stream"),
    widen=("common/dequantize_packed_nvfp4.cu", "dequantize_packed_nvfp4"),
    segments=("sm90/linear_nvfp4_wgmma_segments.cu", "linear_nvfp4_wgmma_segments"),
)


@attrs.frozen(kw_only=True, eq=False)
class PackedNVFP4:
    """One NVFP4 matrix on a CUDA device, ready for the kernels.

    blocks: [ceil(N / 16), ceil(K / 128), 1152] uint8; padding rows and columns have zero codes.
    row_scale: [16 * ceil(N / 16)] float32, 256 * the global scale of each row, in the order of the rows.
    shape: (N, K). paired: rows 16 i .. 16 i + 7 are rows 8 i .. of a first matrix (gate) and the next 8 those of
    a second one (up); N counts both.
    bias: [16 * ceil(N / 16)] float32 in the order of the rows, 0 for padding, or None.
    pre_scale: [K] float32, multiplies x, or None.
    """

    blocks: Tensor
    row_scale: Tensor
    shape: tuple[int, int]
    paired: bool = False
    bias: Tensor | None = None
    pre_scale: Tensor | None = None

    @property
    def format(self) -> PackedFormat:
        """The layout and its kernels."""
        return FORMAT

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return bytes_of(self.blocks, self.row_scale, self.bias, self.pre_scale)
