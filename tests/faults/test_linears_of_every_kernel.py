"""The smallest inputs of the public faults on every kernel that multiplies an NVFP4 weight, as a layer gets it bound.

The reference runs on the CPU, so that what is expected here is tested without a GPU too; the others are marked `gpu`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.kernel_binding import bind_plan, prepare_weights
from vtensors.kernel_targets import reason_against, specificity
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import plan_kernels
from vtensors_formats import NVFP4Weight
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_plugins.backends import cuda, reference

E4M3 = torch.float8_e4m3fn
# With 16-bit activations: names of the others say which they take.
LINEARS = [
    kernel
    for kernel in (*reference.vtensors_kernels(), *cuda.vtensors_kernels())
    if kernel.op == "linear"
    and not {"*", "nvfp4"}.isdisjoint(kernel.schemes)
    and not re.search(r"_w\da\d", kernel.name)
]
# Those that promise rows of the same bits at any number of tokens that they serve.
INVARIANT = [k for k in LINEARS if k.name in ("linear_nvfp4_stream", "linear_nvfp4_stored")]
SIZES = [(n, k) for n in (7, 8, 32, 48, 96, 4304) for k in (64, 176)] + [(8, 4304), (32, 16)]


def _runs(kernel: KernelSpec) -> Any:
    marks = [] if kernel.numerics == "reference" else [pytest.mark.gpu]
    return pytest.param(kernel, id=kernel.name, marks=marks)


every_kernel = pytest.mark.parametrize("kernel", [_runs(kernel) for kernel in LINEARS])


def _request(kernel: KernelSpec, weight: NVFP4Weight, dtype: torch.dtype) -> KernelRequest:
    on_gpu = kernel.numerics != "reference"
    return KernelRequest(
        op="linear",
        scheme="nvfp4",
        activations="16bit",
        device="cuda:0" if on_gpu else "cpu",
        capability=torch.cuda.get_device_capability() if on_gpu else None,
        dtype=str(dtype).removeprefix("torch."),
        shape=weight.shape,
        parts=(weight.shape[0],),
        tokens=kernel.tokens,
    )


def bound(
    kernel: KernelSpec, weight: NVFP4Weight, dtype: torch.dtype = torch.bfloat16
) -> Callable[[Tensor], Tensor]:
    """The kernel on the weight, for x on the CPU of as many rows as it serves; skips where the GPU is another."""
    request = _request(kernel, weight, dtype)
    if specificity(kernel.targets, request) is None:
        pytest.skip(reason_against(kernel.targets, request))
    assert kernel.refuse(request) is None
    there = weight.to(request.device)
    call = kernel.bind(prepare_weights(kernel, [there], request), request)
    return lambda x: call(x.to(dtype).to(request.device)).cpu()


def rows_of(kernel: KernelSpec, x: Tensor) -> Tensor:
    """x repeated to a number of rows that the kernel serves."""
    least = kernel.tokens[0]
    return x.repeat(-(-max(least, 1) // x.shape[0]), 1)


@every_kernel
@pytest.mark.fault("B02")
def test_each_row_is_scaled_by_its_own_block_scales(kernel: KernelSpec) -> None:
    # Both axes tell their place: a 128 x 4 swizzle cannot hide.
    places = ((torch.arange(256).reshape(-1, 1) % 100) + torch.arange(8) + 8).to(torch.uint8)
    codes = torch.full((256, 64), 0x22, dtype=torch.uint8)
    weight = NVFP4Weight(codes=codes, block_scale=places.view(E4M3), global_scale=torch.tensor(0.25))
    x = rows_of(kernel, torch.eye(128)[::16])
    wanted = places.view(E4M3).float().T * 0.25
    assert torch.equal(bound(kernel, weight)(x)[:8].float(), wanted)


@every_kernel
@pytest.mark.fault("B09")
@pytest.mark.parametrize("code", [0x22, 0x11], ids=["ones", "halves"])
def test_no_block_scale_is_flushed_to_zero(kernel: KernelSpec, code: int) -> None:
    every = torch.arange(0, 127, dtype=torch.uint8).reshape(-1, 1)  # 0, then 2^-9 to 448
    codes = torch.full((127, 8), code, dtype=torch.uint8)
    weight = NVFP4Weight(codes=codes, block_scale=every.view(E4M3), global_scale=torch.tensor(1.0))
    y = bound(kernel, weight)(rows_of(kernel, torch.ones(1, 16)))
    # Sixteen times an E4M3 value has four significant bits: exact in bfloat16.
    assert torch.equal(y[0].float(), (16 if code == 0x22 else 8) * every.view(E4M3).float()[:, 0])


@every_kernel
@pytest.mark.fault("B10")
def test_float16_does_not_overflow_before_the_global_scale(kernel: KernelSpec) -> None:
    codes, scales = torch.full((32, 2048), 0x77, dtype=torch.uint8), torch.full((32, 256), 448.0).to(E4M3)
    weight = NVFP4Weight(codes=codes, block_scale=scales, global_scale=torch.tensor(1e-4))
    y = bound(kernel, weight, torch.float16)(rows_of(kernel, torch.ones(1, 4096)))
    torch.testing.assert_close(y.float(), torch.full_like(y, 6 * 448 * 4096e-4).float(), rtol=1e-3, atol=0)


@every_kernel
@pytest.mark.fault("B69")
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_a_weight_of_odd_sizes_is_multiplied_right(kernel: KernelSpec, n: int, k: int) -> None:
    source = torch.Generator().manual_seed(n * k)
    weight = quantize_nvfp4(torch.randn(n, k, generator=source))
    x = rows_of(kernel, torch.randn(3, k, generator=source).to(torch.bfloat16).float())
    wanted = x @ weight.dequantize(torch.float32).T
    error = (bound(kernel, weight)(x).float() - wanted).norm() / wanted.norm()
    assert float(error) < 4e-3


@pytest.mark.gpu
@pytest.mark.fault("B31")
@pytest.mark.parametrize("kernel", INVARIANT, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("n", "k"), [(43, 176), (1160, 5120), (5120, 2048)])
def test_a_row_is_the_same_bits_alone_and_among_any_others(kernel: KernelSpec, n: int, k: int) -> None:
    source = torch.Generator().manual_seed(n)
    call = bound(kernel, quantize_nvfp4(torch.randn(n, k, generator=source)))
    most = kernel.tokens[1] or 32
    x = torch.randn(most, k, generator=source)
    alone = torch.cat([call(one.reshape(1, -1)) for one in x])
    for m in range(1, most + 1):
        assert torch.equal(call(x[:m]), alone[:m]), m
        order = torch.randperm(most, generator=source)[:m]
        assert torch.equal(call(x[order]), alone[order]), m


@pytest.mark.gpu
@pytest.mark.fault("B31")
@pytest.mark.parametrize(("n", "k"), [(96, 512), (5120, 6144)])
def test_a_row_of_the_selected_kernels_is_the_same_bits_at_1_to_32_rows(n: int, k: int) -> None:
    source = torch.Generator().manual_seed(n)
    weight = quantize_nvfp4(torch.randn(n, k, generator=source)).to("cuda")
    request = attrs.evolve(_request(LINEARS[-1], weight, torch.bfloat16), tokens=(1, None))
    plan = plan_kernels(request, [*reference.vtensors_kernels(), *cuda.vtensors_kernels()])
    call = bind_plan(plan, [weight]).call
    x = torch.randn(32, k, generator=source).to(torch.bfloat16).cuda()
    alone = torch.cat([call(one.reshape(1, -1)) for one in x])
    for m in range(1, 33):
        assert torch.equal(call(x[:m]), alone[:m]), [s.kernel.name for s in plan.segments]
