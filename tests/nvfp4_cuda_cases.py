"""NVFP4 weights, inputs and graph replays for the tests of kernels on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from vtensors_formats import NVFP4Weight

HALVES = [torch.bfloat16, torch.float16]
# An output rounds to 8 or 11 bits.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def make_weight(
    n: int, k: int, *, seed: int = 0, group: int = 16, per_row: bool = False, divisor: bool = False
) -> NVFP4Weight:
    """[N, K] on the device: any codes and block scales, under global scales that make products with `make_x` about 1.

    So outputs are normal numbers of either 16-bit format at any K, and so is what a chain of products makes of them.
    per_row: a scale per row, by which each row is about 0.5 to 1.5 for all.
    """
    source = torch.Generator().manual_seed(seed * 1_000_003 + n * 7919 + k)
    scales = torch.randint(1, 127, (n, k // group), generator=source, dtype=torch.uint8)
    unscaled = NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=scales.view(torch.float8_e4m3fn),
        global_scale=torch.ones(()),
    )
    squares = unscaled.dequantize().square()
    size = (squares.sum(1, keepdim=True) if per_row else squares.sum() / n).sqrt()
    scale = (0.5 + torch.rand(size.shape, generator=source)) / size
    return attrs.evolve(
        unscaled,
        global_scale=None if divisor else scale,
        global_divisor=1 / scale if divisor else None,
    ).to("cuda")


def every_code_and_scale() -> NVFP4Weight:
    """127 rows of one block: row s has scale byte s, 0 and subnormals too, and all 16 codes."""
    codes = torch.tensor([(2 * i) | (2 * i + 1) << 4 for i in range(8)], dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8).reshape(127, 1).view(torch.float8_e4m3fn)
    return NVFP4Weight(codes=codes, block_scale=scale, global_scale=torch.tensor(1.0)).to("cuda")


def make_x(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=source).to(dtype).cuda()


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def relative(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours.float() - wanted.float()).norm() / wanted.float().norm())


def replayed(call: Callable[[], torch.Tensor], times: int = 100) -> list[torch.Tensor]:
    """What the graph's output is after 1 and after `times` replays."""
    call()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        out = call()
    for turn in range(times):
        graph.replay()
        if turn in (0, times - 1):
            torch.cuda.synchronize()
            found.append(out.clone())
    return found
