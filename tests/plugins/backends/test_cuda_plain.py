"""Which kernels of plain weights are chosen, by shape and number of rows, and which are refused."""

from __future__ import annotations

import pytest

from vtensors.kernel_plans import decomposer
from vtensors.records import KernelRequest
from vtensors.selection import KernelPlan, plan_kernels
from vtensors_kernels.layouts import prepared_bytes
from vtensors_kernels.ops import OPS
from vtensors_plugins.backends import cuda, reference
from vtensors_plugins.backends.cuda_plain_small import plain_kernels


def request(
    op: str,
    shape: tuple[int, int],
    *,
    dtype: str = "bfloat16",
    scheme: str = "bf16",
    traits: tuple[str, ...] = (),
) -> KernelRequest:
    return KernelRequest(
        op=op,
        scheme=scheme,
        activations="16bit",
        device="cuda:0",
        capability=(9, 0),
        dtype=dtype,
        shape=shape,
        parts=(shape[0],),
        traits=frozenset(traits),
        assumed=True,
    )


def plan(asked: KernelRequest) -> KernelPlan:
    kernels = [*cuda.vtensors_kernels(), *reference.vtensors_kernels()]
    return plan_kernels(asked, kernels, decompose=decomposer({op.name: op.decomposition for op in OPS}))


def chosen(asked: KernelRequest) -> dict[tuple[int, int | None], str]:
    return {segment.tokens: segment.kernel.name for segment in plan(asked).segments}


@pytest.mark.parametrize("op", ["linear", "linears", "linear_add", "norm_linears"])
@pytest.mark.parametrize("shape", [(96, 5120), (257, 2048), (1, 2048)], ids=str)
def test_small_weights_have_their_kernel_up_to_64_rows(op: str, shape: tuple[int, int]) -> None:
    assert chosen(request(op, shape)) == {
        (1, 32): f"{op}_plain_small",
        (33, 64): f"{op}_plain_small_more",
        (65, None): f"{op}_plain_cublas",
    }


@pytest.mark.parametrize("shape", [(34816, 5120), (5120, 17408), (248320, 5120)], ids=str)
def test_large_weights_keep_a_rows_bits_up_to_32_rows_and_go_to_cublas_beyond(shape: tuple[int, int]) -> None:
    segments = plan(request("linear", shape)).segments
    assert [(segment.tokens, segment.kernel.name) for segment in segments] == [
        ((1, 32), "linear_plain_small"),
        ((33, None), "linear_plain_cublas"),
    ]
    assert segments[0].kernel.sums


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request("linear", (96, 5120), traits=("pre_scale",)), "pre-scale"),
        (request("linear", (96, 5120), dtype="float32"), "computes in bfloat16 or float16"),
        (request("linear", (96, 5120), scheme="f16"), "multiplies f16 weights"),
        (request("linear", (96, 100)), "K to be a multiple of 8"),
        (request("norm_linears", (96, 5120), dtype="float16", scheme="f16"), "overflow float16"),
    ],
)
def test_what_the_small_kernel_refuses_is_said(asked: KernelRequest, why: str) -> None:
    kernel = next(k for k in plain_kernels() if k.name == f"{asked.op}_plain_small")
    assert why in str(kernel.refuse(asked))


def test_columns_that_are_no_multiple_of_eight_go_to_cublas() -> None:
    assert chosen(request("linear", (96, 100))) == {(1, None): "linear_plain_cublas"}


def test_a_model_in_float32_stays_with_the_reference() -> None:
    assert chosen(request("linear", (96, 5120), dtype="float32")) == {(1, None): "linear_reference"}


def test_prepared_bytes_are_those_of_the_stacked_rows() -> None:
    assert prepared_bytes("plain-rows", request("linears", (96, 5120), traits=("bias",)), 0) == 96 * (
        10240 + 4
    )
