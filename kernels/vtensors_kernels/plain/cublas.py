"""y = x @ W.T by cuBLAS through torch, the bias or a residual added before the one rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vtensors_kernels.cublas_products import float32_sums
from vtensors_kernels.plain.matrix import PlainMatrix


def plain_product(matrix: PlainMatrix) -> Callable[..., Tensor]:
    """call(x [M, K], residual=None) -> [M, N] in the matrix's dtype, summed in float32.

    residual: [M, N]; where the matrix has a bias too, the sum is rounded before the residual is added.
    """
    rows = matrix.rows
    bias = None if matrix.bias is None else matrix.bias.to(rows.dtype)

    def call(x: Tensor, residual: Tensor | None = None) -> Tensor:
        with float32_sums(x.dtype):
            if residual is not None and bias is None:
                return torch.addmm(residual, x, rows.t())
            y = F.linear(x, rows, bias)
        return y if residual is None else residual + y

    return call
