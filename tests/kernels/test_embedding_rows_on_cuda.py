"""`embedding_rows` on a CUDA device, bound as `embedding_plain`: the reference's rows for every pair of formats."""

from __future__ import annotations

import pytest
import torch

from nvfp4_cuda_cases import HALVES, make_x, replayed
from vtensors.errors import RequestError
from vtensors.kernel_binding import bind_plan
from vtensors.records import KernelRequest
from vtensors.selection import plan_kernels
from vtensors_formats.plain import PlainWeight
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.steps.embedding_rows import bind_embedding_rows, probe_embedding_rows
from vtensors_plugins.backends import cuda, reference

pytestmark = pytest.mark.gpu
STORED = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("columns", [8, 72, 2048, 5120])
def test_rows_are_the_references(columns: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    weight = PlainWeight(tensor=make_x(300, columns, stored))
    call, ids = bind_embedding_rows(weight), torch.randint(0, 300, (130,), device="cuda")
    for tokens in (1, 2, 64, 65, 130):
        out = torch.full((tokens, columns), float("nan"), dtype=dtype, device="cuda")
        assert torch.equal(call(ids[:tokens], dtype, out=out), embedding(ids[:tokens], weight, dtype))
    probe_embedding_rows(columns, stored, dtype, "cuda")


@pytest.mark.parametrize("scheme", ["bf16", "f16", "f32"])
def test_the_backend_binds_it_where_columns_allow(scheme: str) -> None:
    for columns, kernel in ((64, "embedding_plain"), (60, "embedding_reference")):
        weight = PlainWeight(tensor=make_x(40, columns, STORED[["bf16", "f16", "f32"].index(scheme)]))
        request = KernelRequest(
            op="embedding",
            scheme=scheme,
            activations="16bit",
            device="cuda:0",
            capability=torch.cuda.get_device_capability(),
            dtype="bfloat16",
            shape=(40, columns),
            parts=(40,),
        )
        plan = plan_kernels(request, [*reference.vtensors_kernels(), *cuda.vtensors_kernels()])
        bound = bind_plan(plan, [weight])
        assert [segment.kernel.name for segment in bound.segments] == [kernel], bound.rejected
        ids = torch.tensor([39, 0, 0], device="cuda")
        assert torch.equal(bound.call(ids, torch.bfloat16), embedding(ids, weight, torch.bfloat16))


def test_an_id_outside_gives_a_row_of_nan() -> None:
    call = bind_embedding_rows(PlainWeight(tensor=make_x(5, 64, torch.bfloat16)))
    out = call(torch.tensor([5, -1, 4, 2**40], device="cuda"), torch.float16)
    assert out.isnan().all(-1).tolist() == [True, True, False, True]


def test_a_graph_reads_the_ids_of_each_replay() -> None:
    weight = PlainWeight(tensor=make_x(100, 5120, torch.bfloat16))
    call, ids = bind_embedding_rows(weight), torch.tensor([3, 99], device="cuda")
    first, last = replayed(lambda: call(ids, torch.bfloat16))
    assert torch.equal(first, last)
    assert torch.equal(first, weight.tensor[ids])


def test_what_does_not_fit_is_refused() -> None:
    call = bind_embedding_rows(PlainWeight(tensor=make_x(5, 64, torch.bfloat16)))
    with pytest.raises(RequestError, match="ids do not fit"):
        call(torch.zeros(2, dtype=torch.int32, device="cuda"), torch.bfloat16)
    with pytest.raises(RequestError, match="16 bits"):
        call(torch.zeros(2, dtype=torch.int64, device="cuda"), torch.float32)
    with pytest.raises(RequestError, match="multiple of 8"):
        bind_embedding_rows(PlainWeight(tensor=make_x(5, 60, torch.bfloat16)))
