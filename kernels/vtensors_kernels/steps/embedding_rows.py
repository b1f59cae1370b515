"""Rows of a plain embedding matrix, gathered by one kernel; reference: `reference/embedding.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors_formats.plain import PlainWeight
from vtensors_kernels.alignment import aligned
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.row_gather import RowGather
from vtensors_kernels.steps.rows import device_of

SOURCE, FUNCTION = "common/embedding_rows.cu", "embedding_rows"
COLUMNS_PER_THREAD = 8
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

INSTANTIATIONS = tuple(
    Instantiation(source=SOURCE, function=FUNCTION, defines={"VT_F16": f16, "VT_WEIGHT": kind}, hot=True)
    for f16, kind in product((0, 1), _KINDS.values())
)


def bind_embedding_rows(weight: PlainWeight) -> Callable[..., Tensor]:
    """call(ids [T] int64, dtype, out=None) -> [T, K] in dtype: rows of the [V, K] weight, bit for bit the reference's.

    weight: on a CUDA device, K a multiple of 8. dtype: bfloat16 or float16. An id outside 0..V-1 gives a row of NaN,
    since a kernel cannot raise. Errors: RequestError for others; CompileError, LaunchError.
    """
    tensor = weight.tensor
    if tensor.dim() != 2 or not tensor.numel() or tensor.shape[1] % COLUMNS_PER_THREAD:
        raise RequestError(
            "rows cannot be gathered", seen=str(list(tensor.shape)), accepted="[V, K], K a multiple of 8"
        )
    device_of(tensor.device)
    return RowGather(
        (SOURCE, FUNCTION),
        (("VT_WEIGHT", _KINDS[tensor.dtype]),),
        (tensor.shape[0], tensor.shape[1]),
        (aligned(tensor, 16),),
        columns=COLUMNS_PER_THREAD,
    )


def probe_embedding_rows(
    columns: int, stored: torch.dtype, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Raises VtensorsError where gathered rows of K columns differ from the reference's; repeats, first and last row.

    stored: of the weight. dtype: of the output.
    """
    rows = 43
    angles = torch.linspace(-3, 3, rows * columns, dtype=torch.float64) * 1e4
    weight = PlainWeight(tensor=(angles.cos() * 3).reshape(rows, columns).to(stored).to(device))
    ids = torch.tensor([0, rows - 1, 3, 3, rows // 2], device=device)
    out = torch.full((5, columns), float("nan"), dtype=dtype, device=device)
    ours = bind_embedding_rows(weight)(ids, dtype, out=out)
    if not torch.equal(ours, embedding(ids, weight, dtype)):
        raise VtensorsError("the self-test failed: gathered rows differ")
