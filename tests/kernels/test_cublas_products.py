"""Products by cuBLAS: float32 sums whatever torch is set to, and what it is set to stays as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vtensors_kernels.cublas_products import float32_product, float32_sums, scaled_product

HALVES = [torch.bfloat16, torch.float16]
NAMES = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def _set() -> dict[str, bool]:
    return {name: getattr(torch.backends.cuda.matmul, name, False) for name in NAMES}


def _allow(allowed: bool) -> None:
    for name in NAMES:
        if hasattr(torch.backends.cuda.matmul, name):
            setattr(torch.backends.cuda.matmul, name, allowed)


def _relative(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours.double() - wanted).norm() / wanted.norm())


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = _set()
    yield
    for name, value in before.items():
        if hasattr(torch.backends.cuda.matmul, name):
            setattr(torch.backends.cuda.matmul, name, value)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("allowed", [True, False])
def test_reductions_in_16_bits_are_off_inside_and_as_before_after(allowed: bool, dtype: torch.dtype) -> None:
    _allow(allowed)
    before = _set()
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    with float32_sums(dtype):
        inside = _set()
        with float32_sums(dtype):
            pass
        assert _set() == inside
    assert inside == {name: value and kind not in name for name, value in before.items()}
    assert _set() == before


def test_the_setting_comes_back_after_an_error() -> None:
    _allow(True)
    before = _set()
    with pytest.raises(RuntimeError):
        scaled_product(torch.ones(2, 3).half(), torch.ones(2, 4).half(), 1.0)
    assert _set() == before


@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_is_scaled_and_added_to(dtype: torch.dtype) -> None:
    x, matrix = torch.randn(5, 48).to(dtype), torch.randn(7, 48).to(dtype)
    add, out = torch.randn(5, 7).to(dtype), torch.full((5, 14), float("nan")).to(dtype)
    wanted = x.float() @ matrix.float().t() * 0.25
    torch.testing.assert_close(scaled_product(x, matrix, 0.25).float(), wanted, rtol=2e-2, atol=2e-2)
    view = out[:, 7:]
    assert scaled_product(x, matrix, 0.25, add=add, out=view) is view
    torch.testing.assert_close(view.float(), wanted + add.float(), rtol=2e-2, atol=2e-2)
    assert out[:, :7].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "n", "k"), [(65, 128, 16384), (128, 5120, 17408), (100, 256, 65536)])
def test_a_product_is_the_same_bits_whatever_torch_is_set_to(
    m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, matrix = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype)
    add = torch.randn(m, n, device="cuda").to(dtype)
    found = []
    for allowed in (False, True):
        _allow(allowed)
        scaled = scaled_product(x, matrix, 2.0**-6)
        added = scaled_product(x, matrix, 2.0**-6, add=add)
        found.append((scaled, added, float32_product(x, matrix)))
    for strict, loose in zip(*found, strict=True):
        assert torch.equal(strict, loose)
    exact = x.double() @ matrix.double().t()
    scaled, added, kept = found[1]
    assert _relative(kept, exact) < 1e-4
    # One rounding to 8 or 11 bits is 1.6e-3 or 2e-4 of the norm; a sum of two rounded parts is off by more.
    once = 2e-3 if dtype == torch.bfloat16 else 2.5e-4
    assert _relative(scaled, exact * 2.0**-6) < once
    assert _relative(added, exact * 2.0**-6 + add.double()) < once


@pytest.mark.gpu
def test_float16_sums_beyond_its_range_are_scaled_before_they_are_rounded() -> None:
    _allow(True)
    k = 65536
    x = torch.ones(65, k, device="cuda", dtype=torch.float16)
    matrix = torch.full((128, k), 2688.0, device="cuda", dtype=torch.float16)
    out = scaled_product(x, matrix, 1e-6)
    assert torch.allclose(out.float(), torch.full_like(out, k * 2688 * 1e-6).float(), rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_a_captured_product_keeps_float32_sums(dtype: torch.dtype) -> None:
    _allow(True)
    x = torch.randn(65, 16384, device="cuda").to(dtype)
    matrix = torch.randn(128, 16384, device="cuda").to(dtype)
    wanted = scaled_product(x, matrix, 0.01)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_product(x, matrix, 0.01)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
