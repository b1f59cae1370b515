"""Rows of a quantized embedding, gathered and dequantized by one kernel; reference: `reference/embedding.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.alignment import aligned
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.row_gather import RowGather

SOURCE, FUNCTION = "common/embedding_nvfp4.cu", "embedding_nvfp4"
INSTANTIATIONS = tuple(
    Instantiation(source=SOURCE, function=FUNCTION, defines={"VT_F16": f16, "VT_DIVISOR": divisor}, hot=True)
    for f16, divisor in product((0, 1), (0, 1))
)
_COLUMNS_PER_THREAD = 16


def bind_embedding(weight: NVFP4Weight) -> Callable[..., Tensor]:
    """call(ids [T] int64, dtype, out=None) -> [T, K] in dtype: rows of the [V, K] weight, bit for bit the reference's.

    weight: on a CUDA device. dtype: bfloat16 or float16. An id outside 0..V-1 gives a row of NaN, since a kernel
    cannot raise. Errors: RequestError for other ids or dtype; CompileError, LaunchError.
    """
    if weight.device.type != "cuda" or not all(weight.shape):
        raise RequestError("rows are gathered on a CUDA device", seen=f"{weight.shape} on {weight.device}")
    stored = weight.global_scale if weight.global_scale is not None else weight.global_divisor
    if stored is None:
        raise RequestError("an NVFP4 weight without a global scale")
    return RowGather(
        (SOURCE, FUNCTION),
        (("VT_DIVISOR", int(weight.global_scale is None)),),
        weight.shape,
        (aligned(weight.codes, 8), weight.block_scale.contiguous(), stored.contiguous()),
        (weight.group, int(stored.numel() > 1)),
        columns=_COLUMNS_PER_THREAD,
    )
