"""The NVFP4 kernels that read weights as stored, on a CUDA device: linear, argmax, embedding; and all probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import pytest
import torch

from nvfp4_cuda_cases import (
    HALVES,
    TOLERANCE,
    every_code_and_scale,
    make_weight,
    make_x,
    poisoned,
    relative,
    replayed,
)
from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_kernels.reference.embedding import embedding as reference_embedding
from vtensors_kernels.reference.linear import linear

pytestmark = pytest.mark.gpu
Step = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.fault("B09")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("warps", [4, 8, 16])
def test_every_code_times_every_scale_is_exact_in_the_stored_kernel(warps: int, dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear

    weight = every_code_and_scale()
    x = torch.eye(16, dtype=dtype, device="cuda")
    out = bind_linear(weight, dtype, warps=warps)(x, out=poisoned(16, 127, dtype=dtype))
    assert torch.equal(out.float(), weight.dequantize().t())


@pytest.mark.fault("B69")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("group", "per_row", "bias"), [(16, False, True), (32, True, False), (16, True, False)]
)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 64), (17, 96), (43, 352), (400, 2080), (300, 5120)])
@pytest.mark.parametrize("m", [1, 5, 8, 13, 31, 64])
def test_the_stored_kernel_agrees_with_the_reference(
    m: int, n: int, k: int, group: int, per_row: bool, bias: bool, dtype: torch.dtype
) -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear

    weight = make_weight(n, k, group=group, per_row=per_row, divisor=per_row)
    if bias:
        weight = attrs.evolve(weight, bias=torch.randn(n).cuda())
    x = make_x(m, k, dtype)
    ours = bind_linear(weight, dtype)(x, out=poisoned(m, n, dtype=dtype))
    assert relative(ours, linear(x.float(), weight)) < TOLERANCE[dtype]


@pytest.mark.fault("B69")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [16, 48, 144, 176, 2064])
def test_the_stored_kernel_takes_columns_that_are_no_multiple_of_32(k: int, dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear

    weight, x = make_weight(37, k), make_x(9, k, dtype)
    ours = bind_linear(weight, dtype)(x, out=poisoned(9, 37, dtype=dtype))
    assert relative(ours, linear(x.float(), weight)) < TOLERANCE[dtype]


@pytest.mark.fault("B31")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), [(43, 176), (200, 640), (300, 5120), (5000, 2048)])
def test_a_row_is_the_same_bits_at_any_m_place_and_neighbour(n: int, k: int, dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear

    call, x = bind_linear(make_weight(n, k), dtype), make_x(64, k, dtype)
    alone = torch.cat([call(x[i : i + 1]) for i in range(64)])
    for m in (2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64):
        assert torch.equal(call(x[:m]), alone[:m]), m
        assert torch.equal(call(x[64 - m :]), alone[64 - m :]), m
    mixed = torch.randperm(64, generator=torch.Generator().manual_seed(1)).cuda()
    assert torch.equal(call(x[mixed]), alone[mixed])


@pytest.mark.fault("B31")
def test_a_nan_of_one_token_stays_with_it() -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear

    call, x = bind_linear(make_weight(64, 512), torch.bfloat16), make_x(12, 512, torch.bfloat16)
    wanted = call(x)
    x[5] = float("nan")
    out = call(x)
    assert out[5].isnan().all()
    others = [i for i in range(12) if i != 5]
    assert torch.equal(out[others], wanted[others])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (43, 352), (5003, 1024)])
@pytest.mark.parametrize("m", [1, 9, 40])
def test_the_largest_logit_is_the_lowest_row_among_equals(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear, bind_linear_argmax

    weight = make_weight(n, k)
    half = n // 2
    weight.codes[n - half :] = weight.codes[:half]
    weight.block_scale[n - half :] = weight.block_scale[:half]
    x = make_x(m, k, dtype)
    y = bind_linear(weight, dtype)(x)
    rows = torch.arange(n, device="cuda").expand(m, n)
    wanted = torch.where(y == y.amax(-1, keepdim=True), rows, n).amin(-1)
    ours = bind_linear_argmax(weight, dtype)(x, out=torch.full((m,), -1, device="cuda"))
    assert torch.equal(ours, wanted)
    zeros = bind_linear_argmax(weight, dtype)(torch.zeros_like(x))
    assert torch.equal(zeros, torch.zeros_like(zeros))


def _synchronised(steps: Sequence[Step], start: torch.Tensor) -> torch.Tensor:
    value = start
    for step in steps:
        value = step(value)
        torch.cuda.synchronize()
    return value


def _chained(steps: Sequence[Step], start: torch.Tensor) -> torch.Tensor:
    value = start
    for step in steps:
        value = step(value)
    return value


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [512, 1024])
@pytest.mark.parametrize("m", [1, 12, 40])
def test_calls_in_a_chain_of_dependent_launches_see_each_others_results(
    m: int, k: int, dtype: torch.dtype
) -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear

    calls = [bind_linear(make_weight(k, k, seed=i), dtype) for i in range(12)]
    x = make_x(m, k, dtype)
    wanted = _synchronised(calls, x)
    assert 1e-3 < wanted.float().square().mean().sqrt() < 1e3
    for found in (_chained(calls, x), *replayed(lambda: _chained(calls, x))):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("m", [1, 12, 40])
def test_tokens_in_a_chain_of_dependent_launches_are_those_picked_before(m: int) -> None:
    from vtensors_kernels.nvfp4.embedding import bind_embedding
    from vtensors_kernels.nvfp4.stored import bind_linear, bind_linear_argmax

    v, k, dtype = 3000, 1024, torch.bfloat16
    rows = bind_embedding(make_weight(v, k, per_row=True))
    layer = bind_linear(make_weight(k, k, seed=1), dtype)
    largest = bind_linear_argmax(make_weight(v, k, seed=2, per_row=True), dtype)
    steps: list[Step] = [lambda ids: rows(ids, dtype), layer, largest] * 6
    ids = torch.arange(m, device="cuda")
    wanted = _synchronised(steps, ids)
    assert wanted.min() >= 0
    for found in (_chained(steps, ids), *replayed(lambda: _chained(steps, ids))):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("argmax", [False, True])
def test_a_hundred_replays_agree(argmax: bool) -> None:
    from vtensors_kernels.nvfp4.stored import bind_linear, bind_linear_argmax

    weight, x = make_weight(400, 1024, per_row=True), make_x(20, 1024, torch.bfloat16)
    call = (bind_linear_argmax if argmax else bind_linear)(weight, x.dtype)
    first, last = replayed(lambda: call(x))
    assert torch.equal(first, last)
    assert torch.equal(first, call(x))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("group", "per_row", "divisor"), [(16, False, False), (32, True, False), (16, True, True)]
)
@pytest.mark.parametrize(("v", "k"), [(1, 32), (50, 96), (300, 5120)])
def test_gathered_rows_are_bit_for_bit_the_references(
    v: int, k: int, group: int, per_row: bool, divisor: bool, dtype: torch.dtype
) -> None:
    from vtensors_kernels.nvfp4.embedding import bind_embedding

    weight = make_weight(v, k, group=group, per_row=per_row, divisor=divisor)
    ids = torch.randint(0, v, (70,)).cuda()
    ours = bind_embedding(weight)(ids, dtype, out=poisoned(70, k, dtype=dtype))
    assert torch.equal(ours, reference_embedding(ids, weight, dtype))


@pytest.mark.fault("B09")
@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_times_every_scale_is_gathered_exactly(dtype: torch.dtype) -> None:
    from vtensors_kernels.nvfp4.embedding import bind_embedding

    weight = attrs.evolve(every_code_and_scale(), global_scale=torch.tensor(0.37).cuda())
    ids = torch.arange(127).cuda()
    assert torch.equal(bind_embedding(weight)(ids, dtype), weight.dequantize(dtype))


def test_an_id_outside_the_vocabulary_gives_a_row_of_nan() -> None:
    from vtensors_kernels.nvfp4.embedding import bind_embedding

    out = bind_embedding(make_weight(10, 64))(torch.tensor([3, 10, -1]).cuda(), torch.bfloat16)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()


@pytest.mark.fault("B83")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("k", "traits"),
    [
        (k, traits)
        for k in (16, 32, 48, 672, 5120, 17408)
        for traits in ((), ("bias", "row_scale"), ("pre_scale", "group32"))
        if k % 32 == 0 or "group32" not in traits
    ],
)
def test_the_probes_pass(k: int, traits: tuple[str, ...], dtype: str) -> None:
    from vtensors_kernels.nvfp4 import probes

    def request(op: str, *parts: int) -> KernelRequest:
        return KernelRequest(
            op=op,
            scheme="nvfp4",
            activations="16bit",
            device="cuda:0",
            capability=torch.cuda.get_device_capability(0),
            dtype=dtype,
            shape=(sum(parts), k),
            parts=parts,
            traits=frozenset(traits),
        )

    probes.probe_linear_stored(request("linear", 512))
    probes.probe_linear_argmax_stored(request("linear_argmax", 5000))
    probes.probe_packed_widening(request("linear", 512))
    probes.probe_packed_widening(request("linear_add", 512))
    probes.probe_packed_widening(request("linears", 512, 64, 64))
    probes.probe_packed_widening(request("linear_swiglu", 512, 512))
    probes.probe_embedding(request("embedding", 512))


@pytest.mark.fault("B83")
def test_a_probe_tells_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensors_kernels.nvfp4 import probes, stored
    from vtensors_kernels.nvfp4.repack import row_scale as right

    monkeypatch.setattr(stored, "row_scale", lambda weight: right(weight) * 1.01)
    request = KernelRequest(
        op="linear",
        scheme="nvfp4",
        activations="16bit",
        device="cuda:0",
        dtype="bfloat16",
        shape=(64, 256),
        parts=(64,),
    )
    with pytest.raises(VtensorsError, match="self-test failed: one token"):
        probes.probe_linear_stored(request)


def test_inputs_that_do_not_fit_are_refused() -> None:
    from vtensors_kernels.nvfp4 import stored

    weight = make_weight(32, 64)
    call = stored.bind_linear(weight, torch.bfloat16, max_tokens=4)
    with pytest.raises(RequestError, match="too many tokens"):
        call(make_x(5, 64, torch.bfloat16))
    with pytest.raises(RequestError, match="does not fit the weight"):
        call(make_x(1, 64, torch.float16))
    with pytest.raises(RequestError, match="output does not fit"):
        call(make_x(1, 64, torch.bfloat16), out=poisoned(2, 32, dtype=torch.bfloat16))
    with pytest.raises(RequestError, match="16 bits"):
        stored.bind_linear(weight, torch.float32)
    assert call(make_x(0, 64, torch.bfloat16)).shape == (0, 32)
