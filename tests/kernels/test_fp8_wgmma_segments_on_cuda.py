"""`linear_fp8_wgmma_segments` on a Hopper device: bit for bit what `linear_fp8_stream` gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_kernels.fp8.packed import PackedFP8
from vtensors_kernels.fp8.probes import random_fp8
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.stream import probe_fp8_segments
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments
from vtensors_kernels.nvfp4.wgmma_segments_form import compiled_forms

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SCHEMES = ("fp8-tensor", "fp8-row", "mxfp8")
MATRICES = [(16384, 5120), (14336, 5120), (5120, 6144)]
TAILS = [(16, 32), (40, 288), (333, 2080), (1030, 4128), (5, 17408)]
TOKENS = (1, 7, 17, 24, 25, 31, 32, 33, 48, 63, 64)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")


def _request(scheme: str, n: int, k: int, op: str = "linear", *traits: str) -> KernelRequest:
    return KernelRequest(
        op=op,
        scheme=scheme,
        activations="16bit",
        device="cuda:0",
        capability=(9, 0),
        dtype="bfloat16",
        shape=(n, k),
        traits=frozenset(traits),
    )


def _matrix(scheme: str, n: int, k: int, *traits: str, paired: bool = False) -> PackedFP8:
    request = _request(scheme, n, k, "linear", *traits)
    return pack_fp8([random_fp8(request, n, seed=i) for i in range(2 if paired else 1)], paired=paired)


def _compare(packed: PackedFP8, dtype: torch.dtype, epilogue: str = "linear") -> None:
    k = packed.shape[1]
    linear, stream = WgmmaSegments(packed, dtype, epilogue), StreamLinear(packed, dtype, epilogue)
    x = torch.randn(64, k, generator=torch.Generator().manual_seed(k)).to(CUDA, dtype)
    residual = torch.randn(64, linear.out_features, device=CUDA).to(dtype)
    for m in TOKENS:
        added = residual[:m] if epilogue == "linear_add" else None
        linear.workspace.poison()
        out = torch.full((m, linear.out_features), float("nan"), dtype=dtype, device=CUDA)
        ours, wanted = linear(x[:m], added, out), stream(x[:m], added)
        assert not wanted.isnan().any()
        different = ours.view(torch.int16) != wanted.view(torch.int16)
        assert not different.any(), f"M = {m}: {int(different.sum())} of {ours.numel()} differ"
    assert not linear.workspace.counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), MATRICES)
def test_the_matrices_of_the_models_give_the_bits_of_the_stream(n: int, k: int, dtype: torch.dtype) -> None:
    _compare(_matrix("fp8-tensor", n, k), dtype)


@pytest.mark.parametrize("epilogue", ["linear", "linear_add"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), TAILS)
def test_tails_give_the_bits_of_the_stream(n: int, k: int, scheme: str, epilogue: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        _compare(_matrix(scheme, n, k, "bias", "pre_scale"), dtype, epilogue)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("features", [8, 24, 33, 1160])
def test_swiglu_of_paired_rows_gives_the_bits_of_the_stream(features: int, scheme: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        _compare(_matrix(scheme, features, 1056, paired=True), dtype, "linear_swiglu")


@pytest.mark.parametrize("clusters", [1, 7, 33, 132])
@pytest.mark.parametrize("width", [24, 32])
def test_every_form_and_cut_gives_the_bits_of_the_stream(width: int, clusters: int) -> None:
    import attrs

    packed = _matrix("fp8-row", 2600, 1312)
    x = torch.randn(width, 1312, device=CUDA).bfloat16()
    wanted: Tensor = StreamLinear(packed, torch.bfloat16)(x)
    for form in compiled_forms(width, packed.format.block_bytes):
        linear = WgmmaSegments(packed, torch.bfloat16, forms=(attrs.evolve(form, blocks=clusters),))
        for _ in range(2):
            linear.workspace.poison()
            assert torch.equal(linear(x), wanted)


@pytest.mark.parametrize("tokens", [(17, 32), (33, 64)])
@pytest.mark.parametrize("op", ["linear", "linears", "linear_add", "linear_swiglu"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_probe_passes(scheme: str, op: str, tokens: tuple[int, int]) -> None:
    import attrs

    probe_fp8_segments(attrs.evolve(_request(scheme, 16384, 2048, op), tokens=tokens))
