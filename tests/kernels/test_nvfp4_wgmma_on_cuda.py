"""`linear_nvfp4_wgmma` on a Hopper device: tails, variants, forms, graphs, poisoned memory."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.wgmma import TOLERANCE, WgmmaLinear, WgmmaWorkspace, probe_wgmma, random_weight
from vtensors_kernels.nvfp4.wgmma_form import CLUSTERS, RINGS, WIDTHS, WgmmaForm
from vtensors_kernels.nvfp4.wgmma_probe import probe_wgmma_rows
from vtensors_kernels.reference.nvfp4_packing import unpack_reference

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]
CUDA = torch.device("cuda", 0)
TOKENS = [1, 17, 33, 48, 63, 64]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")


def _x(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(CUDA, dtype)


def _run(linear: WgmmaLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    linear.workspace.poison()
    out = torch.full((x.shape[0], linear.out_features), float("nan"), dtype=x.dtype, device=CUDA)
    return linear.run(x, out, residual)


def _wanted(packed: PackedNVFP4, x: Tensor) -> Tensor:
    return x.float() @ unpack_reference(packed).T


def _check(ours: Tensor, wanted: Tensor) -> None:
    assert not ours.isnan().any()
    error = (ours.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)
    assert float(error.max()) < TOLERANCE, f"worst row {int(error.argmax())}: {float(error.max()):.1e}"


@pytest.mark.fault("B69")
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 16), (8, 128), (15, 272), (64, 144), (200, 2048), (513, 512), (1024, 400), (2048, 4096)]
)
def test_any_shape_and_number_of_tokens(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    packed = pack([random_weight(n, k, CUDA, n + k)])
    x = _x(m, k, dtype)
    _check(_run(WgmmaLinear(packed, dtype), x), _wanted(packed, x))


@pytest.mark.parametrize("blocks", [1, 7, 66, 132])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("warpgroups", RINGS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_form_and_cut_of_the_matrix(width: int, warpgroups: int, cluster: int, blocks: int) -> None:
    chunk, slots = RINGS[warpgroups]
    form = WgmmaForm(
        tokens=width,
        warpgroups=warpgroups,
        cluster=cluster,
        blocks=-(-blocks // cluster) * cluster,
        chunk=chunk,
        slots=slots,
    )
    packed = pack([random_weight(1160, 1296, CUDA, 3)])
    linear = WgmmaLinear(packed, torch.bfloat16, forms=(form,), tokens=(1, width))
    x = _x(width - 1, 1296, torch.bfloat16)
    first = _run(linear, x)
    _check(first, _wanted(packed, x))
    assert torch.equal(_run(linear, x), first)


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("features", [8, 24, 40, 33, 1160])
def test_swiglu_of_paired_rows(m: int, features: int, dtype: torch.dtype) -> None:
    packed = pack([random_weight(features, 1040, CUDA, seed) for seed in (1, 2)], paired=True)
    x = _x(m, 1040, dtype)
    gate, up = _wanted(packed, x).chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    _check(_run(WgmmaLinear(packed, dtype, "linear_swiglu"), x), wanted)


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("n", [40, 77, 1160])
def test_residual_is_added_before_the_rounding(m: int, n: int) -> None:
    packed = pack([random_weight(n, 1040, CUDA, 5)])
    x, residual = _x(m, 1040, torch.bfloat16), _x(m, n, torch.bfloat16)
    ours = _run(WgmmaLinear(packed, torch.bfloat16, "linear_add"), x, residual)
    _check(ours, _wanted(packed, x) + residual.float())


@pytest.mark.fault("B05")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("paired", [False, True])
def test_bias_pre_scale_and_a_global_scale_per_row(dtype: torch.dtype, paired: bool) -> None:
    n, k, m = 332, 656, 50
    source = torch.Generator().manual_seed(9)
    pre_scale = torch.rand(k, generator=source) + 0.5

    def part(seed: int) -> NVFP4Weight:
        plain = random_weight(n, k, CUDA, seed)
        rows = torch.rand((n, 1), generator=source).to(CUDA) / k + 1e-4
        bias = torch.randn(n, generator=source).to(CUDA)
        return attrs.evolve(plain, global_scale=rows, bias=bias, pre_scale=pre_scale.to(CUDA))

    parts = [part(1), part(2)]
    packed = pack(parts, paired=paired)
    x = _x(m, k, dtype)
    scaled = (x.float() * pre_scale.to(CUDA)).to(dtype)
    wanted = _wanted(packed, scaled) + torch.cat([one.bias for one in parts if one.bias is not None])
    if paired:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(gate) * up
    _check(_run(WgmmaLinear(packed, dtype, "linear_swiglu" if paired else "linear"), x), wanted)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_times_every_block_scale_is_exact(dtype: torch.dtype) -> None:
    codes = torch.tensor([(2 * i % 16) | (2 * i + 1) % 16 << 4 for i in range(8)], dtype=torch.uint8)
    scale = torch.arange(127, dtype=torch.uint8).reshape(127, 1).view(torch.float8_e4m3fn)
    weight = NVFP4Weight(
        codes=codes.repeat(127, 1),
        block_scale=scale,
        global_scale=torch.tensor(1.0),
    ).to("cuda")
    packed = pack([weight])
    x = torch.eye(16, device=CUDA, dtype=dtype)
    ours = _run(WgmmaLinear(packed, dtype), x)
    assert torch.equal(ours.float(), weight.dequantize(torch.float32).T)


@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (5120, 6144), (1024, 2048)])
def test_a_hundred_graph_replays_agree_in_shared_memory_full_of_ones(n: int, k: int) -> None:
    workspace = WgmmaWorkspace(device=CUDA)
    first = WgmmaLinear(pack([random_weight(n, k, CUDA, 1)]), torch.bfloat16, workspace=workspace)
    second = WgmmaLinear(pack([random_weight(k, n, CUDA, 2)]), torch.bfloat16, workspace=workspace)
    x = _x(64, k, torch.bfloat16)
    wanted = second(first(x))
    workspace.poison()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = second(first(x))
    for _ in range(100):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, wanted)
    assert not workspace.counters.any()


@pytest.mark.fault("B83")
@pytest.mark.parametrize("epilogue", ["linear", "linears", "linear_add", "linear_swiglu"])
def test_the_probe_passes_for_a_large_shape(epilogue: str) -> None:
    probe_wgmma((34816, 5120), torch.bfloat16, epilogue, CUDA, (33, 64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("op", "n", "k", "traits"),
    [
        ("linear", 640, 16, ()),
        ("linear", 5120, 17408, ("bias", "row_scale")),
        ("linear", 640, 288, ("group32", "pre_scale")),
        ("linears", 14336, 5120, ("row_scale",)),
        ("linear_add", 5120, 17408, ()),
        ("linear_swiglu", 34816, 5120, ("row_scale", "bias")),
    ],
)
def test_the_probe_of_rows_of_different_sizes_passes(
    op: str, n: int, k: int, traits: tuple[str, ...], dtype: str
) -> None:
    parts = (n // 2, n // 2) if op in ("linears", "linear_swiglu") else (n,)
    probe_wgmma_rows(
        KernelRequest(
            op=op, scheme="nvfp4", activations="16bit", device="cuda:0", capability=(9, 0), dtype=dtype,
            shape=(n, k), parts=parts, tokens=(33, 64), traits=frozenset(traits),
        )
    )  # fmt: skip


def test_rows_of_x_may_lie_apart_and_what_does_not_fit_is_refused() -> None:
    packed = pack([random_weight(64, 256, CUDA, 1)])
    linear = WgmmaLinear(packed, torch.bfloat16, tokens=(33, 64))
    wide = _x(40, 512, torch.bfloat16)
    _check(_run(linear, wide[:, 256:]), _wanted(packed, wide[:, 256:]))
    _check(_run(linear, wide[:, 1:257]), _wanted(packed, wide[:, 1:257]))
    for bad in (_x(65, 256, HALVES[0]), _x(40, 128, HALVES[0]), _x(40, 256, HALVES[1])):
        with pytest.raises(RequestError, match="does not fit"):
            linear(bad)
    with pytest.raises(RequestError, match="paired"):
        WgmmaLinear(packed, torch.bfloat16, "linear_swiglu")
