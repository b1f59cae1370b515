"""FP8 weights: E4M3 codes with one scale per matrix, per row or per block of rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs
import torch
from torch import Tensor

from vtensors.errors import ClaimError
from vtensors_formats import e4m3, e8m0
from vtensors_formats.groups import split_groups
from vtensors_formats.values import (
    first_index,
    refusal,
    require_not_negative,
    require_positive,
    tensor_name,
    zero_scale_refusal,
)
from vtensors_formats.weight import Weight, cut_rows

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK_ELEMENTS = 4 << 20


@attrs.frozen(kw_only=True, eq=False)
class FP8Weight(Weight):
    """W[n, k] = e4m3(codes[n, k]) * scale, in float32; the scale always multiplies, whatever its name on
    disk.

    codes: [N, K] float8_e4m3fn.
    scale: float32, or bfloat16 / float16 as stored (widened exactly, never rounded):
    [] with block None (`fp8-tensor`), [N, 1] with block None (`fp8-row`), or
    [ceil(N / BN), ceil(K / BK)] with block (BN, BK) (`fp8-block`; uint8 or float8_e8m0fnu is E8M0 there).
    Blocks at the lower and right edge may be partial.
    row_offset: rows of the first scale row that lie before this view (0 unless cut by `rows`).
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None
    row_offset: int = 0

    def __attrs_post_init__(self) -> None:
        n, k = self.codes.shape
        shapes: list[tuple[int, ...]] = [(), (n, 1)]
        dtypes: tuple[torch.dtype, ...] = _FLOATS
        if self.block is not None:
            shapes = [(_ceil(self.row_offset + n, self.block[0]), _ceil(k, self.block[1]))]
            dtypes = (*_FLOATS, *e8m0.DTYPES)
        if (
            self.codes.dtype != torch.float8_e4m3fn
            or self.scale.dtype not in dtypes
            or tuple(self.scale.shape) not in shapes
        ):
            raise ClaimError(
                "the parts of an FP8 weight do not fit",
                seen=f"codes {self.codes.dtype} {[n, k]}, scale {self.scale.dtype} {list(self.scale.shape)}",
                accepted="codes torch.float8_e4m3fn [N, K], scale "
                + " or ".join(str(list(shape)) for shape in shapes)
                + " of "
                + ", ".join(str(dtype) for dtype in dtypes),
            )

    @property
    def scheme(self) -> str:
        """`fp8-tensor`, `fp8-row` or `fp8-block`."""
        if self.block is not None:
            return "fp8-block"
        return "fp8-row" if self.scale.ndim else "fp8-tensor"

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def stored(self) -> tuple[Tensor, ...]:
        """Codes and scale."""
        return self.codes, self.scale

    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop as a view; start need not be a multiple of the block's rows."""
        self.check_rows(start, stop)
        scale, row_offset = self.scale, 0
        if self.block is None and scale.ndim:
            scale = scale[start:stop]
        elif self.block is not None:
            first, last = self.row_offset + start, self.row_offset + stop
            scale = self.scale[first // self.block[0] : _ceil(last, self.block[0])]
            row_offset = first % self.block[0]
        return attrs.evolve(
            self,
            codes=self.codes[start:stop],
            scale=scale,
            row_offset=row_offset,
            bias=cut_rows(self.bias, start, stop),
        )

    def scale_float32(self) -> Tensor:
        """The scale as float32, exact, in its own shape."""
        stored = self.scale
        return stored.to(torch.float32) if stored.dtype in _FLOATS else e8m0.decode(stored)

    def dequantize_float32(self) -> Tensor:
        """float32 [N, K]."""
        values, scale = e4m3.decode(self.codes), self.scale_float32()
        if self.block is None:
            return values.mul_(scale)
        width = self.block[1]
        scale = scale[self._scale_rows()]
        whole = values.shape[1] // width
        split_groups(values[:, : whole * width], width).mul_(scale[:, :whole, None])
        values[:, whole * width :].mul_(scale[:, whole:])
        return values

    def check_codes_and_scales(self, names: Mapping[str, str]) -> None:
        """Refuses NaN codes, scales that are not finite or negative, a zero scale of the whole matrix, and a
        zero row or block scale over codes that are not zero.
        """
        index = e4m3.first_nan(self.codes)
        if index is not None:
            tensor = tensor_name(names, "codes")
            raise refusal(
                "a code is NaN", tensor=tensor, index=index, value="nan", accepted="finite E4M3 codes"
            )
        tensor = tensor_name(names, "scale")
        scale = self.scale_float32()
        if scale.ndim == 0:
            require_positive(scale, tensor=tensor, what="scale", largest=e4m3.MAX)
            return
        require_not_negative(scale, tensor=tensor, what="scale", largest=e4m3.MAX)
        zero = scale == 0
        if not bool(zero.any()):
            return
        found = self._first_code_under(zero)
        if found is not None:
            raise zero_scale_refusal(tensor=tensor, what="scale", index=found)

    def _scale_rows(self) -> Tensor:
        """int64 [N]: the scale row of each row."""
        height = 1 if self.block is None else self.block[0]
        return (torch.arange(self.shape[0], device=self.device) + self.row_offset) // height

    def _first_code_under(self, zero: Tensor) -> tuple[int, ...] | None:
        """Index into the scale of the first marked block that covers a code that is not zero, or None."""
        k = self.shape[1]
        width = k if self.block is None else self.block[1]
        scale_rows = self._scale_rows()
        marked_rows = zero.any(1)[scale_rows].nonzero().flatten()
        step = max(1, _CHUNK_ELEMENTS // max(1, k))
        for rows in torch.split(marked_rows, step):
            marked = zero[scale_rows[rows]].repeat_interleave(width, dim=1)[:, :k]
            index = first_index(marked & ~e4m3.is_zero(e4m3.as_bytes(self.codes)[rows]))
            if index is not None:
                return int(scale_rows[rows[index[0]]]), index[1] // width
        return None


def canonical_scale(
    scale: Tensor, shape: tuple[int, int], block: tuple[int, int] | None = None
) -> tuple[Tensor, tuple[int, int] | None]:
    """The scale in canonical shape, as a view, and its block (None: per matrix or per row). The shape
    decides.

    scale: as stored. shape: (N, K) of the codes. block: (BN, BK) where the checkpoint speaks of blocks.
    Accepted: [], [1], [1, 1] -> []; [N], [N, 1] -> [N, 1]; with a block also [ceil(N / BN), ceil(K / BK)] and
    nvidia-modelopt's [ceil(N / BN), 1, ceil(K / BK), 1] -> the grid. A [1, 1] that is the whole grid is a
    grid.
    Raises ClaimError on any other shape.
    """
    n, k = shape
    stored = tuple(scale.shape)
    if block is not None:
        grid = (_ceil(n, block[0]), _ceil(k, block[1]))
        if stored in (grid, (grid[0], 1, grid[1], 1)):
            return scale.reshape(grid), block
    if scale.numel() == 1 and len(stored) <= 2:
        return scale.reshape(()), None
    if stored in ((n,), (n, 1)):
        return scale.reshape(n, 1), None
    accepted = f"[], [1], [{n}] or [{n}, 1]"
    if block is not None:
        accepted += f", or for blocks of {block[0]} x {block[1]}: {list(grid)} or {[grid[0], 1, grid[1], 1]}"
    raise ClaimError(
        "an FP8 scale fits neither the matrix, its rows nor its blocks",
        seen=f"scale {list(stored)} for codes {[n, k]}",
        accepted=accepted,
    )


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
