"""y = q(x) @ W.T by FP8 tensor cores, through cuBLAS: quantizer, `torch._scaled_mm`, and what is left of the scales.

Where all rows share one scale and x has a stored one, cuBLAS applies both to its float32 sums and rounds once. Else it
hands over the sums in float32 (its own rowwise scaling is slower on sm_90 than the whole product) and a kernel of ours
scales them by row and token, adds, and rounds once. cuBLAS chooses its order of sums by the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.activation_quantizers.fp8 import FP8Quantizer, QuantizedRows, Scaling
from vtensors_kernels.arguments import output_for, residual_for
from vtensors_kernels.fp8.stacked import StackedFP8
from vtensors_kernels.nvfp4.finish import Finish

# Of cuBLAS: sums of at most 128 products in the tensor cores' own, shorter format, the rest in float32. True leaves all
# of K to the tensor cores, which keep about 13 bits.
FAST_ACCUMULATION = False
# Float32 sums of one product; more tokens are cut.
SUMS_BYTES = 256 << 20
# Scales of x that go with scales of blocks of a weight, and of rows.
_OF_BLOCKS, _OF_ROWS = (Scaling.GROUP,), (Scaling.STORED, Scaling.TOKEN)
# cuBLAS's scales of groups lie by token; their rows begin at multiples of 16 bytes.
_TOKENS_OF_GROUPS = 4


class W8A8Linear:
    """call(x, residual=None, out=None) -> y: `linear`, `linears` (stacked), `linear_add`, `linear_swiglu` (paired).

    dtype: bfloat16 or float16. fast: see FAST_ACCUMULATION. Any number of rows M.
    Errors: RequestError for arguments that do not fit; CompileError, LaunchError; what torch raises without FP8.
    """

    def __init__(
        self,
        weight: StackedFP8,
        dtype: torch.dtype,
        epilogue: str = "linear",
        *,
        fast: bool = FAST_ACCUMULATION,
    ) -> None:
        if epilogue not in ("linear", "linear_add", "linear_swiglu"):
            raise RequestError("no such variant", seen=epilogue)
        if weight.paired != (epilogue == "linear_swiglu"):
            raise RequestError("the matrix is stacked for another op", seen=epilogue)
        (n, k), device = weight.shape, weight.codes.device
        self._weight, self._dtype, self._fast = weight, dtype, fast
        self._adds, self._columns = epilogue == "linear_add", n // 2 if weight.paired else n
        self._blocks = weight.block_scale is not None
        self._quantizer = FP8Quantizer(
            weight.activation, k, dtype, device, pre_scale=weight.pre_scale, scales_by_group=self._blocks
        )
        if self._quantizer.scaling not in (_OF_BLOCKS if self._blocks else _OF_ROWS):
            raise RequestError(
                "cuBLAS scales blocks of a weight with groups of x, and rows with tokens",
                seen=f"{type(weight.activation).__name__} of a weight with scales of "
                + ("blocks" if self._blocks else "rows"),
            )
        self._matrix, one = weight.codes.t(), torch.ones((), device=device)
        self._x_scale, self._w_scale, self._row_scale = one, one, weight.row_scale
        self._direct = self._blocks and not self._adds and not weight.paired and weight.bias is None
        if weight.block_scale is not None:
            self._w_scale = weight.block_scale.t()
        if self._quantizer.stored is not None and weight.row_scale is not None:
            self._set_stored(self._quantizer.stored, weight.row_scale)
        self._finish: Finish | None = None
        if not self._direct:
            self._finish = Finish.make(dtype, self._columns, device, swiglu=weight.paired)
        self._most = max(64, SUMS_BYTES // (4 * n))

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """[M, N] of the dtype, [M, N / 2] for linear_swiglu. x: [M, K]. residual: [M, N], with linear_add."""
        m, columns = x.shape[0], self._columns
        residual = residual_for(x, (m, columns), self._dtype, residual, wanted=self._adds)
        if self._blocks and self._finish is not None and m > self._most:
            return self._in_turns(x, residual, output_for(x, (m, columns), self._dtype, out))
        padding = -m % _TOKENS_OF_GROUPS if self._blocks else 0
        rows = self._quantizer(torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x)
        if not m:
            return output_for(x, (m, columns), self._dtype, out)
        if self._finish is None:
            y = self._product(rows, self._dtype)[:m]
            return y if out is None else output_for(x, (m, columns), self._dtype, out).copy_(y)
        out = output_for(x, (m, columns), self._dtype, out)
        for first in range(0, m, self._most):
            self._finished(self._finish, rows, residual, out, first, min(self._most, m - first))
        return out

    def _in_turns(self, x: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
        """Tokens quantized and multiplied so many at a time: scales of groups lie by all tokens of a product."""
        for first in range(0, x.shape[0], self._most):
            part = slice(first, first + self._most)
            self(x[part], None if residual is None else residual[part], out[part])
        return out

    def _set_stored(self, stored: Tensor, row_scale: Tensor) -> None:
        """One scale of all rows goes to cuBLAS as it is; else x's stored scale joins those of the rows."""
        weight = self._weight
        if bool((row_scale == row_scale[0]).all()):
            self._x_scale, self._w_scale, self._row_scale = stored, row_scale[0].clone(), None
            self._direct = not self._adds and not weight.paired and weight.bias is None
        else:
            self._row_scale = row_scale * stored

    def _product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
        """[M, N] = the product, scaled as far as cuBLAS does that."""
        x_scale = rows.scale if self._blocks and rows.scale is not None else self._x_scale
        found: Tensor = torch._scaled_mm(
            rows.rows,
            self._matrix,
            x_scale,
            self._w_scale,
            out_dtype=dtype,
            use_fast_accum=self._fast and not self._blocks,
        )
        return found

    def _finished(
        self,
        finish: Finish,
        rows: QuantizedRows,
        residual: Tensor | None,
        out: Tensor,
        first: int,
        count: int,
    ) -> None:
        """Tokens first .. first + count of out."""
        part = rows
        if not self._blocks:
            scale = None if rows.scale is None else rows.scale[first : first + count]
            part = QuantizedRows(rows=rows.rows[first : first + count], scale=scale)
        sums = self._product(part, torch.float32)
        by_token = 0 if self._blocks or part.scale is None else part.scale.data_ptr()
        bias = self._weight.bias
        finish(
            sums,
            count,
            out[first:].data_ptr(),
            out.shape[1],
            row_scale=0 if self._row_scale is None else self._row_scale.data_ptr(),
            token_scale=by_token,
            bias=0 if bias is None else bias.data_ptr(),
            residual=0 if residual is None else residual[first:].data_ptr(),
        )
