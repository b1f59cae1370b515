"""Rows of an embedding matrix of any scheme; only the rows asked for are dequantized."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors_formats.plain import PlainWeight
from vtensors_formats.weight import Weight


def embedding(ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """[T, K] in dtype. ids: [T] int64, each 0..V-1. weight: (V, K). Raises IndexError on another id."""
    if isinstance(weight, PlainWeight):
        return weight.tensor.index_select(0, ids).to(dtype)
    rows, places = ids.unique(return_inverse=True)
    if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= weight.shape[0]):
        raise IndexError(f"token id {int(rows[-1])} is outside the embeddings of {weight.shape[0]} rows")
    table = torch.empty(len(rows), weight.shape[1], dtype=dtype, device=ids.device)
    for place, row in enumerate(rows.tolist()):
        table[place] = weight.rows(row, row + 1).dequantize(dtype)[0]
    return table[places]
