"""An MLP whose products hand on their stages, on a Hopper device: the bits of two linears for every number of rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_formats import FP8Weight
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear, WgmmaWorkspace, random_weight
from vtensors_kernels.nvfp4.wgmma_mlp import WgmmaMlp
from vtensors_kernels.nvfp4.wgmma_mlp_probe import probe_wgmma_mlp
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
EPS = 1e-6
# K, I: ranges that end within groups of rows, tails of stages; a layer of a large model.
SHAPES = [(1040, 528), (2048, 3056), (5120, 17408)]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")


def _matrices(kind: str, hidden: int, width: int) -> tuple[Any, Any]:
    """gate and up, down."""

    def weight(n: int, k: int, seed: int) -> Any:
        if kind == "nvfp4":
            return random_weight(n, k, CUDA, seed)
        codes = torch.randn(n, k, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA)
        return FP8Weight(codes=codes.to(torch.float8_e4m3fn), scale=torch.tensor(1 / k**0.5, device=CUDA))

    make: Any = pack if kind == "nvfp4" else pack_fp8
    pair = [weight(width, hidden, seed) for seed in (1, 2)]
    return make(pair, paired=True), make([weight(hidden, width, 3)])


def _h(m: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, hidden, generator=torch.Generator().manual_seed(m)).to(CUDA, dtype)


def _linears(packed: Any, dtype: torch.dtype, op: str, kind: str) -> list[Any]:
    """For up to 32 rows and for more."""
    few = WgmmaSegments(packed, dtype, op)
    return [few, WgmmaLinear(packed, dtype, op, tokens=(33, 64)) if kind == "nvfp4" else few]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_every_number_of_rows_has_the_bits_of_both_linears(
    hidden: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    gate_up, down = _matrices(kind, hidden, width)
    gain = torch.linspace(0.5, 1.5, hidden, device=CUDA)
    ups, downs = _linears(gate_up, dtype, "linear_swiglu", kind), _linears(down, dtype, "linear_add", kind)
    mlp = WgmmaMlp(gate_up, down, dtype, tokens=(17, 64))
    for m in range(17, 65):
        h, which = _h(m, hidden, dtype), int(m > 32)
        wanted = downs[which](ups[which].normed(h, gain, EPS), h)
        assert not wanted.isnan().any()
        mlp.workspace.poison()
        for _ in range(2):
            assert torch.equal(mlp(h, gain, EPS), wanted), f"M = {m}"


def test_layers_that_share_a_workspace_follow_each_other_in_a_graph() -> None:
    """Layers and linears of other shapes beside each other: every replay gives the bits of the calls one by one."""
    work = WgmmaWorkspace(device=CUDA)
    matrices = [_matrices(kind, 1040, width) for kind in ("nvfp4", "fp8") for width in (528, 3056)]
    mlps = [WgmmaMlp(*pair, torch.bfloat16, tokens=(17, 32), workspace=work) for pair in matrices] * 4
    linear = WgmmaSegments(pack([random_weight(1040, 1040, CUDA, 5)]), torch.bfloat16, workspace=work)
    gain, h = torch.ones(1040, device=CUDA), _h(29, 1040, torch.bfloat16)

    def all_of_them(alone: bool) -> Tensor:
        x = h
        for mlp in mlps:
            x = linear(mlp(x, gain, EPS))
            if alone:
                torch.cuda.synchronize()
        return x

    wanted = all_of_them(alone=True)
    assert not wanted.isnan().any()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_of_them(alone=False)
        with torch.cuda.graph(graph, stream=stream):
            ours = all_of_them(alone=False)
        for _ in range(50):
            graph.replay()
            stream.synchronize()
            assert torch.equal(ours, wanted)


def test_threads_on_one_stream_do_not_write_over_each_others_stages() -> None:
    work = WgmmaWorkspace(device=CUDA)
    mlps = [
        WgmmaMlp(*_matrices("nvfp4", 1040, width), torch.bfloat16, workspace=work) for width in (528, 3056)
    ]
    gain, cases = torch.ones(1040, device=CUDA), [(i, m) for i in (0, 1) for m in (17, 32, 33, 64)] * 4
    wanted = [mlps[i](_h(m, 1040, torch.bfloat16), gain, EPS) for i, m in cases]
    stream = torch.cuda.current_stream()

    def call(i: int, m: int) -> Tensor:
        with torch.cuda.stream(stream):
            return mlps[i](_h(m, 1040, torch.bfloat16), gain, EPS)

    with ThreadPoolExecutor(4) as pool:
        given = [pool.submit(call, *case) for case in cases]
        assert all(torch.equal(one.result(), right) for one, right in zip(given, wanted, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("first", "second", "most"),
    [("nvfp4", "nvfp4", 64), ("fp8-row", "mxfp8", 64), ("nvfp4", "fp8-tensor", 32)],
)
@pytest.mark.parametrize(("hidden", "width"), [(5120, 17408), (128, 416)])
def test_the_self_test_passes(
    first: str, second: str, most: int, hidden: int, width: int, dtype: str
) -> None:
    def request(op: str, scheme: str, shape: tuple[int, int]) -> KernelRequest:
        return KernelRequest(
            op=op,
            scheme=scheme,
            activations="16bit",
            device="cuda:0",
            capability=(9, 0),
            dtype=dtype,
            shape=shape,
        )

    up = request("norm_linear_swiglu", first, (2 * width, hidden))
    probe_wgmma_mlp(up, request("linear_add", second, (hidden, width)), (17, most))
