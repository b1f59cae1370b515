"""The self-test of products with NVFP4 activations accepts an honest call and refuses each faulty one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.nvfp4.w4a4_probes import probe_product, reference_w4a4
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

OPS = ["linear", "linears", "linear_add", "linear_swiglu", "norm_linears", "norm_linear_swiglu"]


def asked(op: str, dtype: str = "bfloat16") -> KernelRequest:
    parts = (24, 24) if op.endswith(("linears", "swiglu")) else (48,)
    return KernelRequest(
        op=op, scheme="nvfp4", activations="fp4", device="cpu", dtype=dtype, shape=(48, 320), parts=parts
    )


def sums_of(x: Tensor, weights: Sequence[NVFP4Weight]) -> list[Tensor]:
    """Row by row, so that a row's bits depend on no other."""
    return [torch.cat([reference_w4a4(row.unsqueeze(0), weight) for row in x]) for weight in weights]


def binder(
    change_x: Callable[[Tensor], Tensor] = lambda x: x,
    change: Callable[[NVFP4Weight], NVFP4Weight] = lambda weight: weight,
    change_y: Callable[[Tensor], Tensor] = lambda y: y,
) -> Callable[[Sequence[NVFP4Weight], KernelRequest], Callable[..., Tensor]]:
    """An op made of the reference with one fault."""

    def bind(weights: Sequence[NVFP4Weight], request: KernelRequest) -> Callable[..., Tensor]:
        parts = [change(weight) for weight in weights]

        def call(x: Tensor, *rest: Any) -> Tensor:
            dtype = x.dtype
            if request.op.startswith("norm_"):
                x = rms_norm(x, rest[0], rest[1], zero_centered=False)
            sums = sums_of(change_x(x), parts)
            y = swiglu(*sums) if request.op.endswith("swiglu") else torch.cat(sums, dim=-1)
            if request.op == "linear_add":
                y = y + rest[0].float()
            return change_y(y).to(dtype)

        return call

    return bind


def without_global_scale(weight: NVFP4Weight) -> NVFP4Weight:
    activation = weight.activation
    assert isinstance(activation, FP4Activation)
    stored = activation.global_scale if activation.global_scale is not None else activation.global_divisor
    assert stored is not None
    return attrs.evolve(weight, activation=FP4Activation(global_scale=torch.ones_like(stored)))


def other_sense(weight: NVFP4Weight) -> NVFP4Weight:
    activation = weight.activation
    assert isinstance(activation, FP4Activation)
    swapped = FP4Activation(global_scale=activation.global_divisor, global_divisor=activation.global_scale)
    return attrs.evolve(weight, activation=swapped)


@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_an_honest_call_passes(op: str, dtype: str, divisor: bool) -> None:
    probe_product(asked(op, dtype), binder(), divisor=divisor, same_rows=True)


@pytest.mark.fault("B01")
@pytest.mark.fault("B32")
@pytest.mark.parametrize(
    ("fault", "bind"),
    [
        ("16-bit activations", binder(change=lambda w: attrs.evolve(w, activation=None))),
        ("no global scale of the activations", binder(change=without_global_scale)),
        ("a divisor that multiplies", binder(change=other_sense)),
        ("swapped halves of a group", binder(change_x=lambda x: x.roll(8, -1))),
        ("a scale of another group", binder(change=lambda w: attrs.evolve(w, block_scale=_rolled(w)))),
        ("a column that is not written", binder(change_y=lambda y: _poisoned(y))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("op", ["linear", "linear_swiglu"])
def test_a_faulty_call_fails(op: str, fault: str, bind: Any) -> None:
    for divisor in (False, True):
        with pytest.raises(VtensorsError, match="the self-test failed"):
            probe_product(asked(op), bind, divisor=divisor, same_rows=False)


@pytest.mark.fault("B31")
def test_a_call_whose_rows_depend_on_their_number_fails() -> None:
    bind = binder(change_y=lambda y: y * (1 + 1e-3 * y.shape[0]))
    with pytest.raises(VtensorsError, match="differ from those at M = 1"):
        probe_product(attrs.evolve(asked("linear"), tokens=(1, 3)), bind, divisor=False, same_rows=True)


def _rolled(weight: NVFP4Weight) -> Tensor:
    return weight.block_scale.view(torch.uint8).roll(1, -1).view(torch.float8_e4m3fn)


def _poisoned(y: Tensor) -> Tensor:
    y = y.clone()
    y[..., -1] = float("nan")
    return y
