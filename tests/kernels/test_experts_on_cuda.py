"""The grouped experts on a CUDA device: every scheme, tails, bits at any M, routing that changes within a graph."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from experts_cases import SCHEMES, packed_reference, random_choice, random_experts
from experts_cuda_cases import Inputs, bound, called, check, reference
from nvfp4_cuda_cases import HALVES
from vtensors.errors import RequestError
from vtensors.records import KernelRequest

pytestmark = pytest.mark.gpu

TOKENS = [1, 3, 8, 32, 70, 2048]
# Features of x and of an expert: those of the 35B, tails of 16 and 128, more than four steps in both.
SHAPES = [(2048, 512), (272, 48), (1168, 144), (1280, 640)]


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4_experts_are_the_reference_at_any_m(
    shape: tuple[int, int], dtype: torch.dtype, inside: bool
) -> None:
    weights = random_experts("nvfp4", 12, *shape, shared=inside, device="cuda")
    call = bound(weights, 12, dtype)
    for m in (*TOKENS, 9, 17):
        given = Inputs.make(m, shape[0], 12, 8, dtype, shared=not inside)
        check(called(call, given), reference(weights, 12, given))


@pytest.mark.fault("B06")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_packed_and_multiplied(scheme: str, dtype: torch.dtype) -> None:
    hidden, width = 1280, 256
    weights = random_experts(scheme, 9, hidden, width, shared=True, device="cuda")
    call = bound(weights, 9, dtype)
    wanted = packed_reference([weight.to("cpu") for weight in weights], 9)
    assert torch.equal(call.packed.gate_up.blocks.cpu(), wanted.gate_up.blocks)
    assert torch.equal(call.packed.down.blocks.cpu(), wanted.down.blocks)
    assert torch.equal(call.packed.down.row_scale.cpu(), wanted.down.row_scale)
    for m in (1, 5, 11, 32, 33, 300):
        given = Inputs.make(m, hidden, 9, 4, dtype)
        check(called(call, given), reference(weights, 9, given))


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor", "fp8-block", "mxfp8"])
def test_a_token_has_the_same_bits_at_any_m_and_beside_any_others(scheme: str) -> None:
    hidden, width = (2048, 512) if scheme == "nvfp4" else (1280, 256)
    call = bound(random_experts(scheme, 12, hidden, width, shared=True, device="cuda"), 12, torch.bfloat16)
    given = Inputs.make(300, hidden, 12, 8, torch.bfloat16)
    whole = called(call, given)
    for m in range(1, 33):
        assert torch.equal(called(call, given.tokens(0, m)), whole[:m]), m
    for first, count in ((17, 1), (40, 9), (100, 33), (3, 70), (299, 1)):
        assert torch.equal(called(call, given.tokens(first, count)), whole[first : first + count]), first
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).cuda()
    mixed = Inputs(*(t if t is None else t[order] for t in attrs.astuple(given, recurse=False)))  # type: ignore[arg-type]
    assert torch.equal(called(call, mixed), whole[order])
    for _ in range(50):
        assert torch.equal(called(call, given.tokens(0, 20)), whole[:20])


@pytest.mark.parametrize("m", TOKENS)
def test_all_tokens_may_choose_the_same_experts(m: int) -> None:
    weights = random_experts("nvfp4", 12, 272, 48, device="cuda")
    call = bound(weights, 12, torch.bfloat16)
    given = Inputs.make(m, 272, 12, 8, torch.bfloat16)
    given.chosen[:] = torch.arange(11, 3, -1, dtype=torch.int32, device="cuda")
    check(called(call, given), reference(weights, 12, given))
    one = attrs.evolve(
        given, chosen=given.chosen[:, :1].contiguous(), router=given.router[:, :1].contiguous()
    )
    check(called(call, one), reference(weights, 12, one))


def test_an_expert_alone_gives_the_bits_of_the_streaming_linears() -> None:
    from vtensors_kernels.nvfp4.repack import pack
    from vtensors_kernels.nvfp4.stream import StreamLinear

    for hidden, width in ((2048, 512), (1168, 144)):
        gate, up, down = random_experts("nvfp4", 3, hidden, width, device="cuda")[3:6]
        call = bound(random_experts("nvfp4", 3, hidden, width, device="cuda"), 3, torch.bfloat16)
        act = StreamLinear(pack([gate, up], paired=True), torch.bfloat16, "linear_swiglu")
        out = StreamLinear(pack([down]), torch.bfloat16)
        for m in (1, 9, 32):
            x = torch.randn(m, hidden, device="cuda").bfloat16()
            chosen = torch.ones(m, 1, dtype=torch.int32, device="cuda")
            ours = call(x, chosen, torch.ones(m, 1, device="cuda"))
            assert torch.equal(ours, out(act(x)))


@pytest.mark.parametrize("m", [1, 8, 32, 70])
def test_the_router_decides_within_a_captured_graph(m: int) -> None:
    weights = random_experts("nvfp4", 12, 272, 48, shared=True, device="cuda")
    call = bound(weights, 12, torch.bfloat16)
    given = Inputs.make(m, 272, 12, 8, torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        called(call, given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = call(given.x, given.chosen, given.router, given.gate, None, given.residual)
    for seed in range(5):
        chosen, router = random_choice(m, 12, 8, seed=seed)
        given.chosen.copy_(chosen)
        given.router.copy_(router)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, called(call, given))


@pytest.mark.parametrize("m", [1, 2, 8, 14, 32, 40])
def test_a_chain_of_dependent_launches_gives_what_launches_one_by_one_give(m: int) -> None:
    from vtensors_kernels.plain.probe import random_matrix
    from vtensors_kernels.plain.small import SmallLinear
    from vtensors_kernels.steps.rms_norm import RMSNormKernel
    from vtensors_kernels.steps.router import RouterTopk

    hidden, experts = 1280, 24
    call = bound(
        random_experts("nvfp4", experts, hidden, 512, shared=True, device="cuda"), experts, torch.bfloat16
    )
    routers = [
        SmallLinear(random_matrix(experts + 1, hidden, torch.bfloat16, "cuda", seed=seed), torch.bfloat16)
        for seed in range(12)
    ]
    norm = RMSNormKernel(torch.ones(hidden, device="cuda"), 1e-6, torch.bfloat16)
    choose = RouterTopk(8, torch.bfloat16)

    def chain(x: Tensor, *, one_by_one: bool) -> Tensor:
        for router in routers:
            normed = norm(x)
            logits = router(normed)
            chosen, weights = choose(logits[:, :experts])
            if one_by_one:
                torch.cuda.synchronize()
            x = call(normed, chosen, weights, logits[:, experts:], None, x)
            if one_by_one:
                torch.cuda.synchronize()
        return x

    first = torch.empty(m, hidden, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(first.zero_(), one_by_one=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = chain(first, one_by_one=False)
        for seed in range(40):
            source = torch.Generator().manual_seed(seed)
            first.copy_(torch.randn(m, hidden, generator=source))
            wanted = chain(first, one_by_one=True).clone()
            assert not wanted.isnan().any()
            for _ in range(5):
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(out, wanted), seed


@pytest.mark.parametrize("m", [1, 12, 40])
def test_an_expert_that_is_none_makes_its_token_nan_and_no_other(m: int) -> None:
    weights = random_experts("nvfp4", 12, 272, 48, device="cuda")
    call = bound(weights, 12, torch.bfloat16)
    given = Inputs.make(m, 272, 12, 8, torch.bfloat16)
    whole = called(call, given)
    for hostile in (-1, 12, 2**31 - 1):
        given.chosen[m // 2, 3] = hostile
        out = call(given.x, given.chosen, given.router, given.gate, None, given.residual)
        assert out[m // 2].isnan().all()
        others = torch.arange(m, device="cuda") != m // 2
        assert torch.equal(out[others], whole[others])


def test_wide_choices_and_int64_ids_are_taken() -> None:
    weights = random_experts("nvfp4", 24, 272, 48, device="cuda")
    call = bound(weights, 24, torch.bfloat16)
    for m, top in ((2, 20), (9, 1), (1, 24)):
        given = Inputs.make(m, 272, 24, top, torch.bfloat16)
        out = called(call, given)
        check(out, reference(weights, 24, given))
        assert torch.equal(called(call, attrs.evolve(given, chosen=given.chosen.long())), out)


def test_what_does_not_fit_is_refused() -> None:
    call = bound(random_experts("nvfp4", 3, 64, 32, shared=True, device="cuda"), 3, torch.bfloat16)
    given = Inputs.make(2, 64, 3, 2, torch.bfloat16)
    assert call(given.x[:0], given.chosen[:0], given.router[:0]).shape == (0, 64)
    with pytest.raises(RequestError, match="input"):
        call(given.x.float(), given.chosen, given.router)
    with pytest.raises(RequestError, match="choice"):
        call(given.x, given.chosen[:1], given.router)
    with pytest.raises(RequestError, match="gate"):
        call(given.x, given.chosen, given.router, given.gate[:1])
    with pytest.raises(RequestError, match="residual"):
        call(given.x, given.chosen, given.router, residual=given.residual[:1])
    with pytest.raises(RequestError, match="among the packed"):
        call(given.x, given.chosen, given.router, shared=given.residual)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_self_test_passes(scheme: str, dtype: str) -> None:
    from vtensors_kernels.experts.probe import probe_experts

    probe_experts(
        KernelRequest(
            op="experts",
            scheme=scheme,
            activations="16bit",
            device="cuda:0",
            capability=torch.cuda.get_device_capability(),
            dtype=dtype,
            shape=(1024, 2048),
            parts=(512, 512, 2048),
            traits=frozenset({"shared_expert"} if scheme == "nvfp4" else ()),
            experts=256,
            chosen=8,
        )
    )
