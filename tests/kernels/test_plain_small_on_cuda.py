"""`linear_plain_small` on a CUDA device: the reference's sums, bits at any M and in every form, graphs, the binding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_formats import PlainWeight
from vtensors_kernels.plain.probe import EPS, probe_plain_small, random_matrix, random_rows, wanted

pytestmark = pytest.mark.gpu
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
# in_proj_b|a, router with the shared gate, shared gate, tails, key and value projections, outputs, a wide one.
SHAPES = [
    (96, 5120),
    (257, 2048),
    (1, 2048),
    (43, 648),
    (1024, 5120),
    (4096, 1000),
    (5120, 6144),
    (16384, 264),
]
TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64)
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def poisoned(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


def request(op: str, shape: tuple[int, int], dtype: torch.dtype, *traits: str) -> KernelRequest:
    return KernelRequest(
        op=op,
        scheme="bf16" if dtype == torch.bfloat16 else "f16",
        activations="16bit",
        device="cuda:0",
        capability=torch.cuda.get_device_capability(),
        dtype=str(dtype).removeprefix("torch."),
        shape=shape,
        parts=(shape[0],),
        traits=frozenset(traits),
    )


@HALVES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from vtensors_kernels.plain.small import SmallLinear

    n, k = shape
    matrix, x = random_matrix(n, k, dtype, "cuda", bias=True), random_rows(64, k, dtype, "cuda")
    residual = random_rows(64, n, dtype, "cuda", seed=2)
    call = SmallLinear(matrix, dtype)
    alone = torch.cat([call(x[t : t + 1], residual[t : t + 1], out=poisoned(1, n, dtype)) for t in range(64)])
    reference = wanted(matrix, x, residual)
    error = ((alone.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max()
    assert float(error) < TOLERANCE[dtype]
    for m in TOKENS:
        for first in {0, 64 - m}:
            rows = slice(first, first + m)
            y = call(x[rows], residual[rows], out=poisoned(m, n, dtype))
            assert torch.equal(y, alone[rows]), f"M = {m} from {first}"


@pytest.mark.parametrize("shape", [(96, 5120), (257, 2048), (4096, 1000)], ids=str)
def test_the_norm_in_front(shape: tuple[int, int]) -> None:
    from vtensors_kernels.plain.small import SmallLinear

    n, k = shape
    matrix = random_matrix(n, k, torch.bfloat16, "cuda")
    x, gain = random_rows(64, k, torch.bfloat16, "cuda"), torch.linspace(0.5, 1.5, k, device="cuda")
    call = SmallLinear(matrix, torch.bfloat16, norm=True)
    alone = torch.cat(
        [call(x[t : t + 1], None, gain, EPS, poisoned(1, n, torch.bfloat16)) for t in range(64)]
    )
    reference = wanted(matrix, x, gain=gain)
    assert float(((alone.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max()) < 8e-3
    for m in TOKENS:
        y = call(x[:m], None, gain, EPS, poisoned(m, n, torch.bfloat16))
        assert torch.equal(y, alone[:m]), f"M = {m}"


def test_rows_may_lie_apart_or_unaligned() -> None:
    from vtensors_kernels.plain.small import SmallLinear

    matrix = random_matrix(96, 1024, torch.bfloat16, "cuda")
    wide = random_rows(20, 3000, torch.bfloat16, "cuda")
    call = SmallLinear(matrix, torch.bfloat16)
    for start in (0, 8, 1, 1500):
        x = wide[:, start : start + 1024]
        assert torch.equal(call(x), call(x.contiguous())), f"from column {start}"


@pytest.mark.parametrize("m", [1, 8, 9, 32])
def test_a_graph_of_dependent_launches_gives_the_same(m: int) -> None:
    """A chain in which each product feeds the next: a launch that read too early would see the one before."""
    from vtensors_kernels.plain.small import SmallLinear

    n = k = 512
    layers = [
        SmallLinear(random_matrix(n, k, torch.bfloat16, "cuda", seed=i), torch.bfloat16) for i in range(6)
    ]
    x = random_rows(m, k, torch.bfloat16, "cuda")
    still = x.clone()

    def chain() -> Tensor:
        y = still
        for layer in layers:
            y = layer(y)
        return y

    torch.cuda.synchronize()
    step = still.clone()
    for layer in layers:
        step = layer(step)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    chain()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, step)


@pytest.mark.parametrize("op", ["linear", "linears", "linear_add", "norm_linears"])
@pytest.mark.parametrize("shape", [(96, 5120), (1, 2048), (5120, 6144)], ids=str)
def test_the_self_test_passes(op: str, shape: tuple[int, int]) -> None:
    probe_plain_small(request(op, shape, torch.bfloat16, "bias"))
    if op != "norm_linears":
        probe_plain_small(request(op, shape, torch.float16))


def test_the_selection_binds_it_for_few_rows_and_cublas_for_many() -> None:
    from vtensors.kernel_binding import bind_plan
    from vtensors.manager import default_plugins
    from vtensors.selection import plan_kernels

    kernels = tuple(owned.record for owned in default_plugins().registry.kernels.values())
    weights = [
        PlainWeight(tensor=random_matrix(n, 5120, torch.bfloat16, "cuda", seed=n).rows) for n in (48, 40)
    ]
    asked = request("linears", (88, 5120), torch.bfloat16)
    bound = bind_plan(plan_kernels(asked, kernels), weights)
    names = [(segment.tokens, segment.kernel.name) for segment in bound.segments]
    assert names[0] == ((1, 32), "linears_plain_small"), bound.rejected
    assert names[-1] == ((65, None), "linears_plain_cublas")
    x = random_rows(100, 5120, torch.bfloat16, "cuda")
    for m in (1, 40, 100):
        reference = torch.cat([x[:m].double() @ weight.tensor.double().T for weight in weights], dim=-1)
        y = bound.call(x[:m])
        assert float(((y.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max()) < 4e-3
