"""Linears for many tokens: packed rows widened to 16 bits, cuBLAS, then what is left of the scale.

The widened values are what a block holds, such as e2m1 * block scale / 256, exact unless the kernel of the format says
otherwise. Sums are float32. Where all rows share one scale and nothing
else is to be added, cuBLAS applies it (alpha) and rounds once; else a kernel of ours scales the float32 sums, adds,
and rounds once. Gate and up of a SwiGLU are rounded first where cuBLAS applies the scale, as the separate ops do.

Memory: one scratch for widened rows, of a few sizes (powers of two up to 512 MiB) so that torch's allocator
hands the same block to every layer; a larger matrix is cut at multiples of 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.arguments import check_residual, check_x, output_for, scaled_x
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream
from vtensors_kernels.cublas_products import float32_product, scaled_product
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.nvfp4.finish import Finish
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.packed_matrix import PackedMatrix
from vtensors_kernels.packed_tiles import TILE_ROWS

INSTANTIATIONS = tuple(
    Instantiation(source=FORMAT.widen[0], function=FORMAT.widen[1], defines={"VT_F16": f16}) for f16 in (0, 1)
)
SCRATCH_BYTES = 512 << 20
_SMALLEST_SCRATCH = 2 << 20
_THREADS = 256


def bind_linear(packed: PackedMatrix, dtype: torch.dtype) -> Callable[..., Tensor]:
    """call(x [M, K] of the dtype, out=None) -> [M, N]; parts packed together come out side by side, in order.

    dtype: bfloat16 or float16. out: to write into, contiguous.
    Errors: RequestError for another dtype, a paired matrix or another x; CompileError, LaunchError.
    """
    linear = _PackedLinear.make(packed, dtype, paired=False)
    return linear.call


def bind_linear_add(packed: PackedMatrix, dtype: torch.dtype) -> Callable[..., Tensor]:
    """call(x [M, K], residual [M, N], out=None) -> [M, N] = x @ W.T + bias + residual.

    Rounded once; otherwise as `bind_linear`.
    """
    linear = _PackedLinear.make(packed, dtype, paired=False)
    return linear.call_add


def bind_linear_swiglu(packed: PackedMatrix, dtype: torch.dtype) -> Callable[..., Tensor]:
    """call(x [M, K] of the dtype, out=None) -> [M, N / 2] = silu(gate) * up of a paired matrix. As `bind_linear`."""
    linear = _PackedLinear.make(packed, dtype, paired=True)
    return linear.call


class PackedWidener:
    """Writes rows first_row .. first_row + rows of a packed matrix without their row_scale.

    first_row and rows: multiples of 16 within the padded rows. dtype: bfloat16 or float16.
    """

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype, first_row: int, rows: int) -> None:
        tiles, steps, _ = packed.blocks.shape
        if first_row % TILE_ROWS or rows % TILE_ROWS or not 0 < rows <= tiles * TILE_ROWS - first_row:
            raise RequestError(
                "row ranges of a packed matrix are whole tiles",
                seen=f"rows {first_row} .. {first_row + rows}",
                accepted=f"multiples of {TILE_ROWS} up to {tiles * TILE_ROWS}",
            )
        self.rows, self.columns, self.dtype = rows, packed.shape[1], dtype
        # Kept, so that the address stays good.
        self._blocks = packed.blocks[first_row // TILE_ROWS :]
        device = packed.blocks.device.index or 0
        warps = rows // TILE_ROWS * steps
        self._launch = Launch(
            function=compiled_function(
                *packed.format.widen, device, {**dtype_defines(dtype), **dict(packed.format.defines)}
            ),
            grid=(-(-warps * 32 // _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            arguments=4,
        )

    def __call__(self, out: Tensor) -> Tensor:
        """out: [rows, K] contiguous, of the dtype; filled on torch's current stream and returned."""
        stream = current_stream(out.device)
        tiles = self.rows // TILE_ROWS
        self._launch.call(stream, self._blocks.data_ptr(), out.data_ptr(), tiles, self.columns)
        return out


@attrs.frozen(kw_only=True)
class _Cut:
    """Whole tiles of rows. first, rows: in packed order. column, columns: what they become in the output."""

    widener: PackedWidener
    finish: Finish
    first: int
    column: int
    columns: int


@attrs.frozen(kw_only=True)
class _PackedLinear:
    """One packed matrix, cut to fit the scratch. alpha: the scale of all rows, or None where rows differ."""

    packed: PackedMatrix
    dtype: torch.dtype
    cuts: tuple[_Cut, ...]
    alpha: float | None
    scratch: int

    @classmethod
    def make(cls, packed: PackedMatrix, dtype: torch.dtype, *, paired: bool) -> _PackedLinear:
        """Compiles what is needed. Raises RequestError where the matrix's pairing is not the one wanted."""
        if packed.paired != paired:
            raise RequestError(
                "the matrix is packed for another op",
                seen="paired rows" if packed.paired else "stacked rows",
                accepted="paired rows for linear_swiglu, stacked rows for all else",
            )
        dtype_defines(dtype)
        n, k = packed.shape
        scale = packed.row_scale
        used = scale[scale != 0]
        # Padding rows have zeros; a real row of zero scale leaves fewer than n others.
        alpha = float(used[0]) if used.numel() == n and bool((used == used[0]).all()) else None
        step = max(TILE_ROWS, SCRATCH_BYTES // (2 * k) // TILE_ROWS * TILE_ROWS)
        padded = packed.blocks.shape[0] * TILE_ROWS
        columns = n // 2 if paired else n
        sums16 = paired and alpha is not None and packed.bias is None
        cuts = []
        for first in range(0, padded, step):
            rows = min(step, padded - first)
            column = first // 2 if paired else first
            width = min(columns - column, rows // 2 if paired else rows)
            cuts.append(
                _Cut(
                    widener=PackedWidener(packed, dtype, first, rows),
                    finish=Finish.make(dtype, width, packed.blocks.device, swiglu=paired, sums16=sums16),
                    first=first,
                    column=column,
                    columns=width,
                )
            )
        scratch = _scratch_bytes(2 * min(step, padded) * k) // 2
        return cls(packed=packed, dtype=dtype, cuts=tuple(cuts), alpha=alpha, scratch=scratch)

    def call(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[M, columns] in the dtype."""
        return self._run(x, None, out)

    def call_add(self, x: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        """[M, columns] in the dtype, residual added before rounding."""
        check_residual(x, (x.shape[0], self.packed.shape[0]), self.dtype, residual)
        return self._run(x, residual.contiguous(), out)

    def _run(self, x: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
        check_x(x, k=self.packed.shape[1], dtype=self.dtype)
        x = scaled_x(x, self.packed.pre_scale)
        width = sum(cut.columns for cut in self.cuts)
        out = output_for(x, (x.shape[0], width), self.dtype, out)
        if x.shape[0] == 0:
            return out
        scratch = torch.empty(self.scratch, dtype=self.dtype, device=x.device)
        by_cublas = self.alpha is not None and self.packed.bias is None and not self.packed.paired
        for cut in self.cuts:
            rows = cut.widener.rows
            matrix = cut.widener(scratch[: rows * x.shape[1]].view(rows, -1))
            if by_cublas:
                self._by_cublas(x, matrix[: cut.columns], residual, out, cut)
            else:
                self._by_kernel(x, matrix, residual, out, cut)
        return out

    def _by_cublas(self, x: Tensor, matrix: Tensor, residual: Tensor | None, out: Tensor, cut: _Cut) -> None:
        """out = alpha * x @ matrix.T + residual, rounded once."""
        target = out[:, cut.column : cut.column + cut.columns]
        add = None if residual is None else residual[:, cut.column : cut.column + cut.columns]
        scaled_product(x, matrix, self.alpha or 1.0, add=add, out=target)

    def _by_kernel(self, x: Tensor, matrix: Tensor, residual: Tensor | None, out: Tensor, cut: _Cut) -> None:
        packed = self.packed
        if packed.paired and self.alpha is not None and packed.bias is None:
            sums = scaled_product(x, matrix, self.alpha)
            scale = 0
        else:
            sums = float32_product(x, matrix)
            scale = packed.row_scale.data_ptr() + 4 * cut.first
        cut.finish(
            sums,
            x.shape[0],
            out.data_ptr() + 2 * cut.column,
            out.shape[1],
            row_scale=scale,
            bias=0 if packed.bias is None else packed.bias.data_ptr() + 4 * cut.first,
            residual=0 if residual is None else residual.data_ptr() + 2 * cut.column,
        )


def _scratch_bytes(wanted: int) -> int:
    """The next power of two, at least 2 MiB; more than SCRATCH_BYTES only where one row tile needs it."""
    size = max(_SMALLEST_SCRATCH, 1 << (wanted - 1).bit_length())
    return size if size <= SCRATCH_BYTES else max(wanted, SCRATCH_BYTES)
