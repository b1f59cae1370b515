"""FP8 activations on CUDA without a GPU: which kernels a device gets, what refuses, what is kept of a weight."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from fp8_cases import make_fp8
from vtensors.errors import RequestError
from vtensors.kernel_rules import KernelRules
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import KernelPlan, decomposer, plan_kernels
from vtensors_formats.activations import FP8StaticActivation
from vtensors_kernels.fp8.stacked import stack_fp8
from vtensors_kernels.layouts import prepared_bytes
from vtensors_kernels.ops import OPS
from vtensors_plugins.backends import cuda, cuda_w8a8, reference

KERNELS = [*reference.vtensors_kernels(), *cuda.vtensors_kernels()]
DECOMPOSE = decomposer({op.name: op.decomposition for op in OPS})
MODES = {
    "fp8-tensor": "fp8-static",
    "fp8-row": "fp8-dynamic",
    "fp8-block": "fp8-dynamic",
    "mxfp8": "fp8-dynamic",
    "nvfp4": "fp8-static",
}
DEVICES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]


def request(
    op: str = "linear",
    scheme: str = "fp8-tensor",
    shape: tuple[int, int] = (5120, 6144),
    capability: tuple[int, int] = (9, 0),
    **changes: Any,
) -> KernelRequest:
    halves = op.endswith(("swiglu", "linears"))
    plain = KernelRequest(
        op=op,
        scheme=scheme,
        activations=MODES[scheme],
        device="cuda:0",
        capability=capability,
        dtype="bfloat16",
        shape=shape,
        parts=(shape[0] // 2,) * 2 if halves else (shape[0],),
        assumed=True,
    )
    return attrs.evolve(plain, **changes)


def plan_of(asked: KernelRequest, rules: str = "") -> KernelPlan:
    parsed = KernelRules.parse(rules, KERNELS, MODES)
    return plan_kernels(asked, KERNELS, parsed, decompose=DECOMPOSE)


def chosen(plan: KernelPlan) -> dict[tuple[int, int | None], str]:
    return {segment.tokens: segment.kernel.name for segment in plan.segments}


def names_of(plan: KernelPlan) -> set[str]:
    own = {segment.kernel.name for segment in plan.segments}
    return own.union(*(names_of(part) for part in plan.parts))


def kernel(name: str) -> KernelSpec:
    return next(k for k in KERNELS if k.name == name)


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("scheme", MODES)
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("linear", (5120, 6144)),
        ("linear", (96, 64)),
        ("norm_linears", (16384, 5120)),
        ("norm_linear_swiglu", (34816, 5120)),
        ("linear_add", (5120, 17408)),
        ("linear_argmax", (248320, 5120)),
    ],
)
def test_every_device_has_kernels_for_fp8_activations_at_any_number_of_rows(
    op: str, shape: tuple[int, int], scheme: str, capability: tuple[int, int]
) -> None:
    found = names_of(plan_of(request(op, scheme, shape, capability)))
    assert found
    assert all("_w8a8" in name or "_w4a8" in name for name in found), found


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 1)])
@pytest.mark.parametrize(
    ("op", "shape", "scheme", "layout"),
    [
        ("linear", (5120, 6144), "fp8-tensor", "stored"),
        ("linear_argmax", (248320, 5120), "fp8-row", "stored"),
        ("norm_linears", (16384, 5120), "fp8-tensor", "fp8-stacked"),
        ("norm_linear_swiglu", (34816, 5120), "fp8-row", "fp8-stacked-pairs"),
    ],
)
def test_fp8_tensor_cores_are_used_where_there_are_any(
    op: str, shape: tuple[int, int], scheme: str, layout: str, capability: tuple[int, int]
) -> None:
    plan = plan_of(request(op, scheme, shape, capability))
    assert chosen(plan) == {(1, None): f"{op}_fp8_w8a8"}
    assert plan.segments[0].kernel.layout == layout
    # cuBLAS promises no order.
    assert plan.segments[0].kernel.sums == ""


@pytest.mark.fault("B86")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
@pytest.mark.parametrize("scheme", ["fp8-tensor", "fp8-row", "fp8-block", "mxfp8"])
def test_a_card_without_fp8_multiplies_the_codes_in_16_bits(scheme: str, capability: tuple[int, int]) -> None:
    plan = plan_of(request("linear", scheme, capability=capability))
    assert all("_fp8_w8a8_emulated_" in name for name in chosen(plan).values())
    found = f"{capability[0]}.{capability[1]}"
    told = kernel("linear_fp8_w8a8").refuse(request(capability=capability))
    assert told == f"needs FP8 tensor cores, compute capability 8.9 or newer, not {found}"


@pytest.mark.fault("B31")
@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("scheme", MODES)
def test_up_to_32_rows_emulated_kernels_keep_one_order_of_sums(
    scheme: str, capability: tuple[int, int]
) -> None:
    plan = plan_of(request("linear_add", scheme, (5120, 17408), capability), f"{scheme}:*_emulated_*")
    few = [segment for segment in plan.segments if segment.tokens[0] <= 32]
    assert few
    assert all("_emulated_" in segment.kernel.name for segment in few)
    assert {segment.kernel.sums for segment in few} == {"eight-segments"}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "linear_fp8_w8a8",
            {"activations": "16bit"},
            "computes with fp8-static or fp8-dynamic activations, not 16bit",
        ),
        (
            "linear_fp8_w8a8",
            {"activations": "fp4"},
            "computes with fp8-static or fp8-dynamic activations, not fp4",
        ),
        ("linear_fp8_w8a8", {"dtype": "float32"}, "computes in bfloat16 or float16, not float32"),
        ("linear_fp8_w8a8", {"shape": (24, 64)}, "needs N to be a multiple of 16 and K of 16, not 24 x 64"),
        ("linear_fp8_w8a8_emulated_stream", {"activations": "16bit"}, "not 16bit"),
        ("linear_fp8_w8a8_emulated_stream", {"shape": (24, 40)}, "needs K to be a multiple of 16, not 40"),
        (
            "linear_fp8_w8a8_emulated_wgmma_segments",
            {"activations": "fp8-dynamic"},
            "cannot scale the sums of a token",
        ),
        ("linear_fp8_stream", {}, "computes with 16-bit activations, not fp8-static"),
    ],
)
def test_a_kernel_that_does_not_serve_says_why(name: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in str(kernel(name).refuse(request(**changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"traits": frozenset({"block64x64"})}, "knows blocks of 128 x 128 alone"),
        ({"shape": (5120, 640)}, "needs K to be a multiple of 512, not 640"),
        ({"activations": "fp8-static"}, "one stored scale"),
        (
            {"op": "linears", "shape": (320, 1024), "parts": (192, 128)},
            "multiple of 128 rows, not of [192, 128]",
        ),
    ],
)
def test_blocks_that_cublas_does_not_scale_are_left_to_emulation(
    changes: dict[str, Any], reason: str
) -> None:
    asked = request(scheme="fp8-block", **changes)
    assert reason in str(kernel(f"{asked.op}_fp8_w8a8_block").refuse(asked))
    if "traits" not in changes:
        assert all("_emulated_" in name for name in names_of(plan_of(asked)))
    assert kernel("linear_fp8_w8a8_block").refuse(request(scheme="fp8-block")) is None


def test_groups_of_another_width_are_left_to_the_reference() -> None:
    asked = request(scheme="fp8-block", traits=frozenset({"block64x64"}))
    assert names_of(plan_of(asked)) == {"linear_reference"}
    told = kernel("linear_fp8_w8a8_emulated_stream").refuse(asked)
    assert told == "scales groups of 128 columns of x, as blocks of 128 x 128 have them"


@pytest.mark.fault("B14")
def test_block_scales_are_stacked_and_multiplied_as_they_are() -> None:
    from vtensors_formats.dynamic_activations import FP8GroupActivation

    weight = make_fp8("block", 128, 512)
    weight = attrs.evolve(weight, scale=torch.full((1, 4), 0.0021), activation=FP8GroupActivation())  # type: ignore[call-arg]
    stacked = stack_fp8([weight])  # type: ignore[list-item]
    assert stacked.block_scale is not None
    assert torch.equal(stacked.block_scale, torch.full((1, 4), 0.0021))


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_stacked_weight_tells_its_size_from_its_shape(bias: bool, kind: str) -> None:
    activation = FP8StaticActivation(scale=torch.tensor(1.0))
    parts = [
        attrs.evolve(
            make_fp8(kind, 128, 512, seed=i), activation=activation, bias=torch.ones(128) if bias else None
        )
        for i in range(2)
    ]
    traits = frozenset({"bias"}) if bias else frozenset()
    asked = request("linears", parts[0].scheme if kind != "block" else "fp8-block", (256, 512), traits=traits)
    assert prepared_bytes("fp8-stacked", asked, stored=0) == stack_fp8(parts).nbytes  # type: ignore[arg-type]


def test_a_weight_that_declares_other_activations_is_not_bound() -> None:
    from vtensors_plugins.backends import cuda_w8a8_binding

    activation = FP8StaticActivation(scale=torch.tensor(1.0))
    weight: Any = attrs.evolve(make_fp8("row", 16, 32), activation=activation)
    with pytest.raises(RequestError, match="cannot run fp8-dynamic activations"):
        cuda_w8a8_binding.bind_native(weight, request(scheme="fp8-row"))
    plain = kernel("linear_fp8_stream")
    with pytest.raises(RequestError, match="cannot run fp8-dynamic activations"):
        cuda_w8a8_binding.with_activation(plain, [weight], request(scheme="fp8-row"))


def test_more_rows_and_larger_weights_cost_more() -> None:
    for record in cuda_w8a8.w8a8_kernels():
        assert callable(record.cost)
        for scheme in record.schemes:
            small = request(record.op, scheme, (1024, 2048))
            large = request(record.op, scheme, (16384, 5120))
            last = min(record.tokens[1] or 512, 512)
            few, many = ((record.tokens[0], None), (last, None))
            costs = [
                record.cost(attrs.evolve(asked, tokens=tokens))
                for asked in (small, large)
                for tokens in (few, many)
            ]
            assert costs[0] < costs[2], record.name
            assert costs[0] <= costs[1], record.name
            assert costs[2] <= costs[3], record.name
