"""What self-tests of kernels share: tolerances, an input, and what a stored verdict depends on."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_kernels.compiling.functions import fingerprint

# Relative to the norm of the outputs, which round to 8 bits or to 11.
TOLERANCES = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
# Of a small random weight. Not a multiple of 16, nor of 8: a tail of rows in every part.
ROWS = 43


def random_x(request: KernelRequest, tokens: int) -> Tensor:
    """[tokens, K] on the request's device, in its dtype, within -1..1."""
    k = 0 if request.shape is None else request.shape[1]
    angles = torch.linspace(-3, 3, tokens * k, dtype=torch.float64) * 1e4
    return angles.cos().reshape(tokens, k).to(dtype_of(request)).to(request.device)


def dtype_of(request: KernelRequest) -> torch.dtype:
    """What the request computes in."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype


def fingerprint_of(request: KernelRequest, *sources: str) -> str:
    """What a stored verdict depends on: each source's text, options and toolkit, for the request's dtype."""
    capability = request.capability or (8, 0)
    defines = {"VT_F16": int(request.dtype == "float16")}
    return " ".join(fingerprint(source, defines, capability) for source in sources)
