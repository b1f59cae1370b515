"""`linear_nvfp4_wgmma_segments` on a Hopper device: bit for bit what `linear_nvfp4_stream` gives.

Outputs start as NaN and workspaces as 0xFF wherever a kernel may not rely on them.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.wgmma import WgmmaWorkspace, random_weight
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments, probe_wgmma_segments
from vtensors_kernels.nvfp4.wgmma_segments_form import WIDTHS, SegmentsForm, compiled_forms
from vtensors_kernels.reference.nvfp4_packing import unpack_reference

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]
CUDA = torch.device("cuda", 0)
TOKENS = [1, 16, 17, 24, 31, 32]
# The matrices, but for the largest.
MATRICES = [
    *((5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144)),
    *((12288, 2048), (2048, 4096), (1024, 2048), (2048, 512)),
]
TAILS = [(1, 16), (8, 128), (15, 272), (64, 144), (200, 1040), (513, 512), (1024, 400), (333, 1296)]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")


def _x(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(CUDA, dtype)


def _run(linear: WgmmaSegments, x: Tensor, residual: Tensor | None = None) -> Tensor:
    linear.workspace.poison()
    out = torch.full((x.shape[0], linear.out_features), float("nan"), dtype=x.dtype, device=CUDA)
    return linear(x, residual, out)


def _same_bits(ours: Tensor, wanted: Tensor) -> None:
    """Zeros of either sign are told apart."""
    assert not wanted.isnan().any()
    different = ours.view(torch.int16) != wanted.view(torch.int16)
    places = [(r, c, float(ours[r, c]), float(wanted[r, c])) for r, c in different.nonzero()[:4].tolist()]
    columns = different.any(0).nonzero().flatten().tolist()
    assert not places, f"{int(different.sum())} of {ours.numel()} differ: {places}; columns {columns[:40]}"


def _compare(packed: PackedNVFP4, dtype: torch.dtype, epilogue: str = "linear") -> None:
    k = packed.shape[1]
    linear, stream = WgmmaSegments(packed, dtype, epilogue), StreamLinear(packed, dtype, epilogue)
    x = _x(32, k, dtype)
    residual = _x(33, linear.out_features, dtype)[:32] if epilogue == "linear_add" else None
    for m in TOKENS:
        added = None if residual is None else residual[:m]
        _same_bits(_run(linear, x[:m], added), stream(x[:m], added))
    assert not linear.workspace.counters.any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), MATRICES)
def test_the_matrices_of_the_models_give_the_bits_of_the_stream(n: int, k: int, dtype: torch.dtype) -> None:
    _compare(pack([random_weight(n, k, CUDA, n + k)]), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gate_and_up_of_a_model_give_the_bits_of_the_stream(dtype: torch.dtype) -> None:
    _compare(
        pack([random_weight(17408, 5120, CUDA, seed) for seed in (1, 2)], paired=True), dtype, "linear_swiglu"
    )


@pytest.mark.parametrize("epilogue", ["linear", "linear_add"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), TAILS)
def test_tails_of_rows_and_columns_give_the_bits_of_the_stream(
    n: int, k: int, dtype: torch.dtype, epilogue: str
) -> None:
    _compare(pack([random_weight(n, k, CUDA, n + k)]), dtype, epilogue)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("features", [8, 24, 40, 33, 1160])
def test_swiglu_of_paired_rows_gives_the_bits_of_the_stream(features: int, dtype: torch.dtype) -> None:
    _compare(
        pack([random_weight(features, 1040, CUDA, seed) for seed in (1, 2)], paired=True),
        dtype,
        "linear_swiglu",
    )


@pytest.mark.parametrize("epilogue", ["linear", "linear_add", "linear_swiglu"])
@pytest.mark.parametrize("dtype", HALVES)
def test_bias_pre_scale_and_a_global_scale_per_row_give_the_bits_of_the_stream(
    dtype: torch.dtype, epilogue: str
) -> None:
    n, k = 332, 656
    source = torch.Generator().manual_seed(9)
    pre_scale = torch.rand(k, generator=source) + 0.5

    def part(seed: int) -> NVFP4Weight:
        rows = torch.rand((n, 1), generator=source).to(CUDA) / k + 1e-4
        bias = torch.randn(n, generator=source).to(CUDA)
        plain = random_weight(n, k, CUDA, seed)
        return attrs.evolve(plain, global_scale=rows, bias=bias, pre_scale=pre_scale.to(CUDA))

    _compare(pack([part(1), part(2)], paired=epilogue == "linear_swiglu"), dtype, epilogue)


@pytest.mark.parametrize("clusters", [1, 3, 7, 10, 33, 66, 132])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_form_and_cut_gives_the_bits_of_the_stream(width: int, clusters: int) -> None:
    packed, x = pack([random_weight(2600, 1296, CUDA, 3)]), _x(width - 1, 1296, torch.bfloat16)
    wanted = StreamLinear(packed, torch.bfloat16)(x)
    for form in compiled_forms(width):
        form = attrs.evolve(form, blocks=min(clusters * form.cluster, 132))
        linear = WgmmaSegments(packed, torch.bfloat16, forms=(form,))
        for _ in range(2):
            _same_bits(_run(linear, x), wanted)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_times_every_block_scale_is_exact(dtype: torch.dtype) -> None:
    codes = torch.tensor([(2 * i % 16) | (2 * i + 1) % 16 << 4 for i in range(8)], dtype=torch.uint8)
    scale = torch.arange(127, dtype=torch.uint8).reshape(127, 1).view(torch.float8_e4m3fn)
    weight = NVFP4Weight(codes=codes.repeat(127, 1), block_scale=scale, global_scale=torch.tensor(1.0))
    packed = pack([weight.to("cuda")])
    ours = _run(WgmmaSegments(packed, dtype), torch.eye(16, device=CUDA, dtype=dtype))
    assert torch.equal(ours.float(), weight.dequantize(torch.float32).T.to(CUDA))


def test_a_row_has_the_same_bits_alone_in_any_place_and_beside_any_neighbours() -> None:
    packed = pack([random_weight(640, 5120, CUDA, 4)])
    linear, stream = WgmmaSegments(packed, torch.bfloat16), StreamLinear(packed, torch.bfloat16)
    x = _x(32, 5120, torch.bfloat16)
    alone = torch.cat([stream(x[i : i + 1]) for i in range(32)])
    _same_bits(_run(linear, x), alone)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).to(CUDA)
    _same_bits(_run(linear, x[order]), alone[order])
    _same_bits(_run(linear, x[7:25]), alone[7:25])


def test_results_are_those_of_the_reference() -> None:
    packed, x = pack([random_weight(1160, 5120, CUDA, 8)]), _x(32, 5120, torch.bfloat16)
    ours, wanted = (
        _run(WgmmaSegments(packed, torch.bfloat16), x).float(),
        x.float() @ unpack_reference(packed).T,
    )
    assert float((ours - wanted).norm() / wanted.norm()) < 4e-3


@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (5120, 6144), (5120, 17408)])
def test_a_hundred_graph_replays_agree_in_shared_memory_full_of_ones(n: int, k: int) -> None:
    workspace = WgmmaWorkspace(device=CUDA)
    first = WgmmaSegments(pack([random_weight(n, k, CUDA, 1)]), torch.bfloat16, workspace=workspace)
    second = WgmmaSegments(pack([random_weight(k, n, CUDA, 2)]), torch.bfloat16, workspace=workspace)
    x = _x(32, k, torch.bfloat16)
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


@pytest.mark.parametrize("epilogue", ["linear", "linears", "linear_add", "linear_swiglu"])
def test_the_probe_passes_for_a_large_shape(epilogue: str) -> None:
    name = "linear" if epilogue == "linears" else epilogue
    probe_wgmma_segments((34816, 5120), torch.bfloat16, name, CUDA, (17, 32))


def test_the_probe_fails_where_a_form_cuts_another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensors.errors import VtensorsError
    from vtensors_kernels.nvfp4 import stream

    def wrong(self: StreamLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        del residual
        return x.new_ones(x.shape[0], self.out_features)

    monkeypatch.setattr(stream.StreamLinear, "__call__", wrong)
    with pytest.raises(VtensorsError, match="bits"):
        probe_wgmma_segments((640, 512), torch.bfloat16, "linear", CUDA, (17, 32))


def test_rows_of_x_may_lie_apart_and_what_does_not_fit_is_refused() -> None:
    packed = pack([random_weight(64, 256, CUDA, 1)])
    linear, stream = WgmmaSegments(packed, torch.bfloat16), StreamLinear(packed, torch.bfloat16)
    wide = _x(20, 512, torch.bfloat16)
    for part in (wide[:, 256:], wide[:, 1:257]):
        _same_bits(_run(linear, part), stream(part))
    for bad in (_x(33, 256, HALVES[0]), _x(20, 128, HALVES[0]), _x(20, 256, HALVES[1])):
        with pytest.raises(RequestError):
            linear(bad)
    with pytest.raises(RequestError, match="paired"):
        WgmmaSegments(packed, torch.bfloat16, "linear_swiglu")
    with pytest.raises(RequestError, match="residual"):
        linear(_x(20, 256, HALVES[0]), _x(20, 64, HALVES[0]))


def test_a_form_is_fitted_to_a_small_matrix() -> None:
    form = SegmentsForm(tokens=32, warpgroups=4, cluster=1, blocks=132, chunk=3, slots=2)
    linear = WgmmaSegments(pack([random_weight(64, 256, CUDA, 1)]), torch.bfloat16, forms=(form,))
    assert [one.blocks for one in linear.forms] == [8]
