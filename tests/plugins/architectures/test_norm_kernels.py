"""Which norms of a decoder a kernel computes, and that the model calls it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tiny_decoders import tiny_config, tiny_model
from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.groups import DryRun
from vtensors_plugins.architectures.models.norm import RMSNorm
from vtensors_plugins.architectures.models.norm_kernels import norm_binder
from vtensors_plugins.backends import cuda, reference

KERNELS = [*reference.vtensors_kernels(), *cuda.vtensors_kernels()]


def options(**changes: Any) -> BuildOptions:
    return attrs.evolve(BuildOptions(dtype=torch.bfloat16, device="cpu", kernels=KERNELS), **changes)


def test_a_bound_kernel_computes_the_norm_with_the_gain() -> None:
    asked: list[tuple[Tensor, float]] = []

    def bind(gain: Tensor, eps: float) -> Any:
        asked.append((gain, eps))
        return lambda x: x * gain

    norm = RMSNorm(torch.tensor([1.0, -0.5]), 1e-6, True, bind)
    assert torch.equal(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[6.0, 2.0]]))
    assert asked[0][0] is norm.gain
    assert asked[0][1] == 1e-6


def test_without_a_device_the_reference_computes_norms() -> None:
    assert norm_binder(64, options()) is None
    planned = DryRun(device="cuda:0", capability=(9, 0), assumed=True)
    assert norm_binder(64, options(device="meta", dry_run=planned)) is None
    model = tiny_model(tiny_config("qwen3_5"))
    assert model.norm.kernel is None
    assert all(layer.input_norm.kernel is None for layer in model.layers)


@pytest.mark.gpu
def test_on_a_device_kernels_compute_norms_of_16_bits_whose_rows_fit() -> None:
    own = options(device="cuda")
    assert norm_binder(64, own) is not None
    for columns, changes in (
        (60, {}),
        (16392, {}),
        (64, {"dtype": torch.float32}),
        (64, {"kernels": reference.vtensors_kernels()}),
        (64, {"dry_run": DryRun(device="cuda:0", capability=(9, 0), assumed=True)}),
    ):
        assert norm_binder(columns, attrs.evolve(own, **changes)) is None
    bind = norm_binder(64, own)
    assert bind is not None
    weight, x = torch.linspace(-0.5, 0.5, 64).cuda(), torch.randn(3, 64).bfloat16().cuda()
    kernel, plain = RMSNorm(weight, 1e-6, True, bind), RMSNorm(weight, 1e-6, True)
    assert kernel.kernel is not None
    assert torch.allclose(kernel(x).float(), plain(x).float(), rtol=2**-7)
