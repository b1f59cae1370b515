"""What the CUDA backend binds on a device: every NVFP4 op at every range of rows against its reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from nvfp4_cuda_cases import TOLERANCE, make_weight, make_x, relative, replayed
from vtensors.kernel_binding import BoundKernel, bind_plan
from vtensors.records import KernelRequest
from vtensors.selection import plan_kernels
from vtensors_formats import NVFP4Weight
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu
from vtensors_plugins.backends import cuda, reference

pytestmark = pytest.mark.gpu
K, EPS = 2064, 1e-6
ROWS = [1, 5, 32, 33, 64, 65, 130]
OPS = {
    "linear": (3000,),
    "linears": (2048, 1000, 40),
    "linear_add": (2048,),
    "linear_swiglu": (1536, 1536),
    "norm_linears": (2048, 1000, 40),
    "norm_linear_swiglu": (1536, 1536),
    "linear_argmax": (3000,),
}


def _bound(
    op: str, weights: Sequence[NVFP4Weight], traits: tuple[str, ...] = (), dtype: str = "bfloat16"
) -> BoundKernel:
    request = KernelRequest(
        op=op,
        scheme="nvfp4",
        activations="16bit",
        device="cuda:0",
        capability=torch.cuda.get_device_capability(),
        dtype=dtype,
        shape=(sum(weight.shape[0] for weight in weights), weights[0].shape[1]),
        parts=tuple(weight.shape[0] for weight in weights),
        traits=frozenset(traits),
    )
    plan = plan_kernels(request, [*reference.vtensors_kernels(), *cuda.vtensors_kernels()])
    bound = bind_plan(plan, weights)
    print(op, [(segment.tokens, segment.kernel.name) for segment in bound.segments], bound.rejected)
    return bound


def _wanted(op: str, x: Tensor, weights: Sequence[NVFP4Weight], rest: Sequence[Any]) -> Tensor:
    if op.startswith("norm_"):
        x = rms_norm(x, rest[0], rest[1], zero_centered=False)
    sums = [linear(x.float(), weight) for weight in weights]
    if op.endswith("swiglu"):
        return swiglu(sums[0], sums[1])
    return torch.cat(sums, dim=-1) + (rest[0].float() if op == "linear_add" else 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_each_op_is_what_its_reference_is_at_any_number_of_rows(op: str, dtype: torch.dtype) -> None:
    weights = [make_weight(n, K, seed=i) for i, n in enumerate(OPS[op])]
    traits = ("row_scale",) if len(weights) > 1 else ()
    bound = _bound(op, weights, traits, str(dtype).removeprefix("torch."))
    assert not any("self-test" in reason or "failed" in reason for _, reason in bound.rejected), (
        bound.rejected
    )
    names = [segment.kernel.name for segment in bound.segments]
    assert names[0] == f"{op}_nvfp4_stream"
    assert all("reference" not in name for name in names)
    for m in ROWS:
        x, gain = make_x(m, K, dtype), torch.rand(K).cuda() * 2
        residual = make_x(m, sum(OPS[op]), dtype, seed=1)
        torch.cuda.synchronize()  # a gain is a parameter, complete before any call
        rest = (residual,) if op == "linear_add" else (gain, EPS) if op.startswith("norm_") else ()
        ours, wanted = bound.call(x, *rest), _wanted(op, x, weights, rest)
        if op == "linear_argmax":
            # Rounding may bring logits level, so it is the value that must be the largest.
            found = wanted.gather(1, ours[:, None])[:, 0]
            assert float((wanted.amax(-1) - found).max() / wanted.abs().max()) < 2 * TOLERANCE[dtype]
        else:
            assert ours.dtype == dtype
            assert relative(ours, wanted) < 3 * TOLERANCE[dtype], f"M = {m}"
        shaped = [
            value.reshape(1, m, -1) if torch.is_tensor(value) and value.dim() == 2 else value
            for value in rest
        ]
        assert torch.equal(bound.call(x.reshape(1, m, K), *shaped), ours.reshape(1, m, *ours.shape[1:]))


@pytest.mark.parametrize("m", ROWS)
def test_layers_of_one_stream_share_a_workspace_and_replay_alike(m: int) -> None:
    one = _bound("linear", [make_weight(2064, K)]).call
    two = _bound("linear_add", [make_weight(2064, K, seed=1)]).call
    x, residual = make_x(m, K, torch.bfloat16), make_x(m, 2064, torch.bfloat16, seed=1)

    def chain() -> Tensor:
        return two(one(two(one(x), residual)), residual)

    first, last = replayed(chain)
    assert torch.equal(first, last)
    assert torch.equal(first, chain())


@pytest.mark.parametrize("traits", [("bias",), ("pre_scale",), ("group32",), ("shared",)])
def test_whatever_a_weight_brings_is_served(traits: tuple[str, ...]) -> None:
    weight = make_weight(1040, K + 16, group=32 if traits == ("group32",) else 16)
    if traits == ("bias",):
        weight = attrs.evolve(weight, bias=torch.randn(1040).cuda())
    if traits == ("pre_scale",):
        weight = attrs.evolve(weight, pre_scale=torch.rand(K + 16).cuda() + 0.5)
    bound = _bound("linear", [weight], traits)
    for m in ROWS:
        x = make_x(m, K + 16, torch.bfloat16)
        assert relative(bound.call(x), linear(x, weight)) < 2 * TOLERANCE[x.dtype], f"M = {m}"


def test_rows_of_an_embedding_are_those_of_the_reference() -> None:
    weight = make_weight(1000, K)
    ids = torch.tensor([0, 999, 5, 5, 17]).cuda()
    bound = _bound("embedding", [weight], ("shared",))
    assert [segment.kernel.name for segment in bound.segments] == ["embedding_nvfp4"]
    assert torch.equal(bound.call(ids, torch.bfloat16), embedding(ids, weight, torch.bfloat16))
