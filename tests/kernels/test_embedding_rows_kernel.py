"""The gather of plain embedding rows in the emulator: bit for bit the reference's, for every pair of formats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_formats.plain import PlainWeight
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.row_gather import THREADS
from vtensors_kernels.steps.embedding_rows import COLUMNS_PER_THREAD, bind_embedding_rows

HALVES = [torch.bfloat16, torch.float16]
STORED = [torch.bfloat16, torch.float16, torch.float32]


def gathered(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    (rows, columns), tokens = weight.shape, ids.shape[0]
    out = torch.full((tokens, columns), 123.0, dtype=dtype)
    blocks = -(-columns // COLUMNS_PER_THREAD // THREADS)
    defines = {"VT_F16": int(dtype == torch.float16), "VT_WEIGHT": STORED.index(weight.dtype)}
    arguments = [ids, weight, out, rows, columns]
    emulate("common/embedding_rows.cu", "embedding_rows", defines, (tokens * blocks,), (THREADS,), arguments)
    return out


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("columns", [8, 72, 1032, 5120])
def test_rows_are_the_references(columns: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(columns)
    weight = (torch.randn(11, columns, generator=source) * torch.logspace(-9, 6, columns)).to(stored)
    ids = torch.tensor([10, 0, 3, 3])
    wanted = embedding(ids, PlainWeight(tensor=weight), dtype)
    assert torch.equal(gathered(ids, weight, dtype).view(torch.int16), wanted.view(torch.int16))


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
def test_an_id_outside_gives_a_row_of_nan_and_touches_nothing(dtype: torch.dtype) -> None:
    weight = torch.ones(5, 64, dtype=dtype)
    out = gathered(torch.tensor([5, -1, 4, 2**40]), weight, dtype)
    assert out.isnan().all(-1).tolist() == [True, True, False, True]


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(RequestError, match="CUDA"):
        bind_embedding_rows(PlainWeight(tensor=torch.ones(4, 8)))
