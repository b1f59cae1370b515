"""The packed FP8 layout (`cuda/include/fp8_packed.cuh`): 16 x 128 blocks in the order that kernels read."""

from __future__ import annotations

import enum

import attrs
from torch import Tensor

from vtensors_kernels.packed_matrix import PackedFormat, bytes_of

LAYOUT = "fp8-packed"
# The same blocks with the rows of gate and up interleaved: what a SwiGLU reads, and nothing else.
PAIRED_LAYOUT = "fp8-packed-pairs"
CODE_BYTES = 2048
_SEGMENTS = "sm90/linear_fp8_wgmma_segments.cu", "linear_fp8_wgmma_segments"
# Of a call: twice the streaming kernel's, which is still faster than widening.
MAX_TOKENS = 64


class Scales(enum.Enum):
    """Where a packed FP8 matrix has its scales; the value is `VT_SCALES` of its kernels."""

    ROWS = 0
    """In row_scale alone: `fp8-tensor` and `fp8-row`."""

    STEPS = 1
    """Float32 values of four rows in a block, for the sums of its columns: `fp8-block`."""

    GROUPS = 2
    """A power of two for 32 columns of a row in a block, and one for the row in row_scale: `mxfp8`."""

    @property
    def block_bytes(self) -> int:
        """Codes and scales of a block of 16 x 128."""
        return CODE_BYTES + (0, 16, 64)[self.value]

    @property
    def format(self) -> PackedFormat:
        """The layout and its kernels."""
        return PackedFormat(
            block_bytes=self.block_bytes,
            stream=("common/linear_fp8_stream.cu", "linear_fp8_stream"),
            widen=("common/dequantize_packed_fp8.cu", "dequantize_packed_fp8"),
            segments=None if self is Scales.STEPS else _SEGMENTS,
            defines=(("VT_SCALES", self.value),),
            most_tokens=MAX_TOKENS,
        )


# Scheme -> how it is packed.
SCALES_OF = {
    "fp8-tensor": Scales.ROWS,
    "fp8-row": Scales.ROWS,
    "fp8-block": Scales.STEPS,
    "mxfp8": Scales.GROUPS,
}


@attrs.frozen(kw_only=True, eq=False)
class PackedFP8:
    """One FP8 or MXFP8 matrix on a CUDA device, ready for the kernels.

    blocks: [ceil(N / 16), ceil(K / 128), scales.block_bytes] uint8; padding rows and columns have zero codes.
    row_scale: [16 * ceil(N / 16)] float32 in the order of the rows, 0 for padding: 256 * the scale of each row (ROWS),
    256 * the power of two at or below the largest scale of the row's weight, by which its blocks are divided (STEPS),
    2^(the row's largest E8M0 byte - 134) (GROUPS).
    shape, paired, bias, pre_scale: as in `PackedNVFP4`.
    """

    blocks: Tensor
    row_scale: Tensor
    shape: tuple[int, int]
    scales: Scales
    paired: bool = False
    bias: Tensor | None = None
    pre_scale: Tensor | None = None

    @property
    def format(self) -> PackedFormat:
        """The layout and its kernels."""
        return self.scales.format

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return bytes_of(self.blocks, self.row_scale, self.bias, self.pre_scale)
