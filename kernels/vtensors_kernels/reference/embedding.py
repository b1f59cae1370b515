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
    wanted = ids.tolist()
    found: dict[int, Tensor] = {}
    for row in wanted:
        if row not in found:
            if not 0 <= row < weight.shape[0]:
                raise IndexError(f"token id {row} is outside the {weight.shape[0]} rows of the embeddings")
            found[row] = weight.rows(row, row + 1).dequantize(dtype)[0]
    return torch.stack([found[row] for row in wanted])
