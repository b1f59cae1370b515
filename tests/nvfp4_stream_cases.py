"""Bound streaming linears and comparisons for the tests of `linear_nvfp4_stream` on a CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvfp4_cuda_cases import TOLERANCE
from vtensors_formats import NVFP4Weight

if TYPE_CHECKING:
    from vtensors_kernels.nvfp4.stream import StreamLinear

# N whose forms are taken: many row tiles per SM, a few, one or two.
ROWS = [248320, 12288, 640]
EPS = 1e-6


def stream_linear(
    weight: NVFP4Weight | list[NVFP4Weight],
    dtype: torch.dtype,
    epilogue: str = "linear",
    *,
    norm: bool = False,
    rows: int | None = None,
    clusters: int | None = None,
) -> StreamLinear:
    from vtensors_kernels.nvfp4.repack import pack
    from vtensors_kernels.nvfp4.stream import StreamLinear

    packed = pack(weight if isinstance(weight, list) else [weight], paired=epilogue == "linear_swiglu")
    return StreamLinear(packed, dtype, epilogue, "norm" if norm else None, rows=rows, clusters=clusters)


def check(ours: Tensor, wanted: Tensor, dtype: torch.dtype, *, roundings: int = 1) -> None:
    """Each token by itself is as close as the rounding of its outputs lets it be."""
    assert not ours.isnan().any()
    error = (ours.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1).clamp(min=1e-6)
    # An output of few columns has few errors to average.
    limit = roundings * TOLERANCE[dtype] * (1 if ours.shape[-1] >= 64 else 2)
    assert float(error.max()) < limit, f"token {int(error.argmax())}: {float(error.max()):.1e}"
