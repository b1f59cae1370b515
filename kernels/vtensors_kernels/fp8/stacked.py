"""FP8 weights as cuBLAS multiplies them: the stored codes, those of several parts below each other, and scales."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import FP8Weight
from vtensors_formats.activations import ActivationQuantizer
from vtensors_kernels.alignment import aligned
from vtensors_kernels.packed_matrix import bytes_of
from vtensors_kernels.packing import biases, check_parts, interleaved

# What cuBLAS asks of both sides; what a block of scales spans.
MULTIPLE, BLOCK = 16, 128
_PAIRED_ROWS = 8


@attrs.frozen(kw_only=True, eq=False)
class StackedFP8:
    """One FP8 matrix [N, K] on a CUDA device; y = x @ (codes * scales).T + bias.

    codes: [N, K] float8_e4m3fn, contiguous. row_scale: [N] float32, or None where blocks have scales.
    block_scale: [ceil(N / 128), K / 128] float32, or None. paired (another layout, for a SwiGLU alone): rows 16 i ..
    + 7 are rows 8 i .. of gate, the next 8 those of up; N counts both. bias: [N] float32 in the order of the rows, or
    None. pre_scale: [K] float32 or None.
    """

    codes: Tensor
    row_scale: Tensor | None
    block_scale: Tensor | None
    activation: ActivationQuantizer
    paired: bool = False
    bias: Tensor | None = None
    pre_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return bytes_of(self.codes, self.row_scale, self.block_scale, self.bias, self.pre_scale)


def stack_fp8(weights: Sequence[FP8Weight], *, paired: bool = False) -> StackedFP8:
    """The weights as one matrix: by rows in order, or two of one shape interleaved by 8 rows. One weight is copied only
    where it does not lie at a multiple of 16 bytes, as cuBLAS asks.

    weights: on one CUDA device, of one K, all with scales per matrix or row, or all per block of 128 x 128.
    Errors: those of `check_parts`; RequestError for sizes that cuBLAS does not take, blocks that are cut or
    interleaved, or a weight that declares no activation quantizer.
    """
    check_parts(weights, paired=paired)
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    if n % MULTIPLE or k % MULTIPLE or (paired and weights[0].shape[0] % _PAIRED_ROWS):
        raise RequestError(
            "cuBLAS multiplies FP8 in sixteens", seen=f"{n} x {k}", accepted=f"multiples of {MULTIPLE}"
        )
    activation = weights[0].activation
    if activation is None:
        raise RequestError("the weight declares no activation quantizer", seen=weights[0].scheme)
    codes = [part.codes for part in weights]
    return StackedFP8(
        codes=aligned(_in_order(codes, paired=paired), MULTIPLE),
        row_scale=_row_scale(weights, paired=paired),
        block_scale=_block_scale(weights, paired=paired),
        activation=activation,
        paired=paired,
        bias=biases(weights, n, paired=paired),
        pre_scale=weights[0].pre_scale,
    )


def _in_order(parts: Sequence[Tensor], *, paired: bool) -> Tensor:
    """Rows of the parts as they are stacked; codes are moved as bytes, which every version of torch can."""
    if len(parts) == 1:
        return parts[0]
    plain = [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]
    return (interleaved(plain) if paired else torch.cat(plain)).view(parts[0].dtype)


def _row_scale(weights: Sequence[FP8Weight], *, paired: bool) -> Tensor | None:
    if any(weight.block is not None for weight in weights):
        return None
    scales = [weight.scale_float32().reshape(-1).expand(weight.shape[0]) for weight in weights]
    return _in_order(scales, paired=paired).contiguous()


def _block_scale(weights: Sequence[FP8Weight], *, paired: bool) -> Tensor | None:
    if all(weight.block is None for weight in weights):
        return None
    whole = all(weight.block == (BLOCK, BLOCK) and not weight.row_offset for weight in weights)
    cut = any(weight.shape[0] % BLOCK for weight in weights[:-1])
    # cuBLAS wants rows of scales at multiples of 16 bytes.
    if not whole or cut or paired or weights[0].shape[1] % (4 * BLOCK):
        raise RequestError(
            "cuBLAS has no such scales of blocks",
            seen=f"blocks of {[weight.block for weight in weights]} in {[weight.shape for weight in weights]}",
            accepted=f"whole blocks of {BLOCK} x {BLOCK}, parts of whole blocks, K a multiple of {4 * BLOCK}",
        )
    return torch.cat([weight.scale_float32() for weight in weights]).contiguous()
