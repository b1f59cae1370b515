"""The reference backend's kernels."""

from __future__ import annotations

import attrs
import pytest
import torch

from vtensors.errors import RequestError
from vtensors.record_checks import check_record
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import plan_kernels
from vtensors_formats import FP4Activation
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.ops import OPS
from vtensors_plugins.backends import reference


def _kernel(op: str) -> KernelSpec:
    return next(kernel for kernel in reference.vtensors_kernels() if kernel.op == op)


def _request(activations: str = "16bit", scheme: str = "nvfp4") -> KernelRequest:
    return KernelRequest(op="linear", scheme=scheme, activations=activations, device="cpu")


@pytest.mark.parametrize("kernel", reference.vtensors_kernels(), ids=lambda kernel: kernel.name)
def test_each_record_is_sound_and_serves_a_listed_op(kernel: KernelSpec) -> None:
    assert check_record(kernel) is None
    assert kernel.op in {op.name for op in OPS}
    assert kernel.name == f"{kernel.op}_reference"


def test_it_serves_schemes_that_nobody_has_heard_of_and_comes_last() -> None:
    fast = attrs.evolve(_kernel("linear"), name="linear_fast", cost=5.0)
    kernels = [*reference.vtensors_kernels(), fast]
    (segment,) = plan_kernels(_request(scheme="int3-of-nobody"), kernels).segments
    assert segment.kernel.name == "linear_fast"


def test_activations_run_as_asked() -> None:
    activation = FP4Activation(global_scale=torch.tensor(0.002))
    weight = attrs.evolve(quantize_nvfp4(torch.randn(8, 32)), activation=activation)
    x, plain = torch.randn(2, 32), weight.dequantize(torch.float32).t()
    weight_only = _kernel("linear").bind(weight, _request())(x)
    declared = _kernel("linear").bind(weight, _request("fp4"))(x)
    torch.testing.assert_close(weight_only, x @ plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(declared, activation(x) @ plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("asked", ["fp4", "fp8-dynamic"])
def test_activations_that_the_weight_does_not_declare_are_refused(asked: str) -> None:
    weight = quantize_nvfp4(torch.randn(8, 32))
    with pytest.raises(RequestError, match=f"cannot run {asked} activations"):
        _kernel("linear").bind(weight, _request(asked))
