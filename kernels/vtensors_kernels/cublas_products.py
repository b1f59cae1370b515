"""Products of 16-bit matrices by cuBLAS through torch, with sums in float32 whatever torch is set to.

torch by default lets cuBLAS add the parts of a product that it cuts along K in the operands' 16 bits, which loses
bits and, in float16, overflows before a scale is applied; it may also be set to sum float16 in float16. Each product
here switches that off around its own launch. That is a setting of the host: it costs about 2 us, chooses
another algorithm at most, and a captured graph holds what was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from types import MappingProxyType

import torch
from torch import Tensor

_KEEPS_SUMS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
# Of torch.backends.cuda.matmul; older releases lack the last.
_SETTINGS: Mapping[torch.dtype, tuple[str, ...]] = MappingProxyType(
    {
        torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
        torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    }
)
# The settings are the process's: two threads must not restore them into each other's products.
_ONE_AT_A_TIME = RLock()


def scaled_product(
    x: Tensor, matrix: Tensor, scale: float, *, add: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """[M, N] = scale * x @ matrix.T + add, summed in float32 and rounded once to the operands' dtype.

    x: [M, K]; matrix: [N, K]; add and out: [M, N] or views of that shape; all bfloat16 or all float16.
    """
    # beta = 0: the first argument is not read.
    beta = 0 if add is None else 1
    added = x.new_empty(1) if add is None else add
    with float32_sums(x.dtype):
        return torch.addmm(added, x, matrix.t(), beta=beta, alpha=scale, out=out)


def float32_product(x: Tensor, matrix: Tensor) -> Tensor:
    """[M, N] float32 = x [M, K] @ matrix [N, K].T with the sums kept: from torch 2.8 on, else widened operands."""
    with float32_sums(x.dtype):
        if _KEEPS_SUMS:
            kept: Tensor = torch.mm(x, matrix.t(), out_dtype=torch.float32)
            return kept
        return x.float() @ matrix.t().float()


@contextmanager
def float32_sums(dtype: torch.dtype) -> Iterator[None]:
    """Products of that dtype launched inside have sums in float32; what torch was set to comes back after."""
    matmul = torch.backends.cuda.matmul
    with _ONE_AT_A_TIME:
        changed = [name for name in _SETTINGS.get(dtype, ()) if getattr(matmul, name, False)]
        for name in changed:
            setattr(matmul, name, False)
        try:
            yield
        finally:
            for name in changed:
                setattr(matmul, name, True)
