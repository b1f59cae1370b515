"""The 16-bit dtypes that kernels compute in, and the macro that says which."""

from __future__ import annotations

import torch

from vtensors.errors import RequestError

HALVES = (torch.bfloat16, torch.float16)


def dtype_defines(dtype: torch.dtype) -> dict[str, int]:
    """`VT_F16` of an operand dtype. Raises RequestError unless it is bfloat16 or float16."""
    if dtype not in HALVES:
        raise RequestError(
            "this kernel computes in 16 bits", seen=str(dtype), accepted="torch.bfloat16 or torch.float16"
        )
    return {"VT_F16": int(dtype == torch.float16)}
