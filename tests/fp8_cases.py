"""FP8 and MXFP8 weights for the tests of the packed layout and its kernels."""

from __future__ import annotations

import attrs
import torch

from vtensors_formats import FP8Weight, MXFP8Weight

KINDS = ["tensor", "row", "block", "mx"]


def finite_codes(n: int, k: int, source: torch.Generator) -> torch.Tensor:
    """float8_e4m3fn [N, K]: any of the 254 codes that are not NaN."""
    codes = torch.randint(0, 254, (n, k), generator=source, dtype=torch.int32)
    return (codes + (codes >= 0x7F)).to(torch.uint8).view(torch.float8_e4m3fn)


def make_fp8(
    kind: str, n: int, k: int, *, seed: int = 0, block: tuple[int, int] = (128, 128), size: bool = True
) -> FP8Weight | MXFP8Weight:
    """[N, K] of random codes; with `size`, products with normal x are about 1."""
    source = torch.Generator().manual_seed(seed * 1_000_003 + n * 7919 + k)
    codes = finite_codes(n, k, source)
    if kind == "mx":
        scale = torch.randint(100, 140, (n, k // 32), generator=source, dtype=torch.uint8)
        weight = MXFP8Weight(codes=codes, scale=scale)
        if not size:
            return weight
        top = weight.dequantize().square().sum(1).mean().log2() / 2
        return attrs.evolve(weight, scale=(scale.int() - int(top)).clamp(0, 254).to(torch.uint8))
    grid = (-(-n // block[0]), -(-k // block[1]))
    shape: tuple[int, ...] = {"tensor": (), "row": (n, 1), "block": grid}[kind]
    scale_shape = torch.rand(shape, generator=source) + 0.5
    weight8 = FP8Weight(codes=codes, scale=scale_shape, block=block if kind == "block" else None)
    if not size:
        return weight8
    top8 = weight8.dequantize().square().sum(1).mean().sqrt()
    return attrs.evolve(weight8, scale=weight8.scale / top8)


def every_code(kind: str = "tensor") -> FP8Weight | MXFP8Weight:
    """[16, 256]: the 254 finite codes and two zeros in every row, each row turned by one, under a scale of 1."""
    codes = torch.arange(256, dtype=torch.int32)
    codes[0x7F] = codes[0xFF] = 0
    turned = torch.stack([codes.roll(row) for row in range(16)]).to(torch.uint8).view(torch.float8_e4m3fn)
    if kind == "mx":
        return MXFP8Weight(codes=turned, scale=torch.full((16, 8), 127, dtype=torch.uint8))
    shape: tuple[int, ...] = {"tensor": (), "row": (16, 1), "block": (1, 2)}[kind]
    return FP8Weight(codes=turned, scale=torch.ones(shape), block=(128, 128) if kind == "block" else None)
