"""What launchers of the CUDA kernels would return, computed by torch on a CPU, with the faults of others or without."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.arguments import scaled_x
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.reference.nvfp4_packing import packed_order, unpack_reference
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

# (x [1, K] float32, matrix [N, K] float32 without its scale, scale [N]) -> [1, N] float32.
Row = Callable[[Tensor, Tensor, Tensor], Tensor]


def honest(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T) * scale


def overflowing(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T).to(torch.float16).float() * scale


def overflowing_packed(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """As the packed layout has it: 2^-8 of the block scales, 2^8 of the global one."""
    return overflowing(x, matrix / 256, scale * 256)


def swapped_nibbles(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return honest(x, matrix.reshape(matrix.shape[0], -1, 2).flip(-1).reshape(matrix.shape), scale)


def kernel_request(
    op: str = "linear", *, k: int = 128, dtype: str = "bfloat16", **changes: Any
) -> KernelRequest:
    plain = KernelRequest(
        op=op,
        scheme="nvfp4",
        activations="16bit",
        device="cpu",
        dtype=dtype,
        shape=(5120, k),
        parts=(2560, 2560) if op.endswith(("swiglu", "linears")) else (5120,),
        tokens=(1, 12),
    )
    return attrs.evolve(plain, **changes)


def _by_rows(row: Row, x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """float32 [M, N], each row by itself, so that its bits do not depend on M."""
    return torch.cat([row(one.reshape(1, -1), matrix, scale) for one in x.float()])


def flushed(weight: NVFP4Weight, least: float) -> NVFP4Weight:
    """The weight with block scales below `least` as zeros."""
    scale = weight.block_scale.float()
    return attrs.evolve(weight, block_scale=torch.where(scale < least, 0.0, scale).to(torch.float8_e4m3fn))


def stored_linear(row: Row, least: float = 0.0) -> Callable[..., Callable[..., Tensor]]:
    """What `stored.bind_linear` gives, by that arithmetic. least: the smallest block scale that is not flushed."""

    def bind(weight: NVFP4Weight, dtype: torch.dtype, **_: Any) -> Callable[..., Tensor]:
        total, weight = weight.global_scale, flushed(weight, least)
        assert total is not None
        matrix = attrs.evolve(weight, global_scale=torch.tensor(1.0)).dequantize(torch.float32)
        scale = total.reshape(-1).expand(weight.shape[0])

        def call(x: Tensor, out: Tensor | None = None) -> Tensor:
            y = _by_rows(row, scaled_x(x, weight.pre_scale), matrix, scale)
            y = y if weight.bias is None else y + weight.bias
            return y.to(dtype) if out is None else out.copy_(y)

        return call

    return bind


class Stream:
    """`StreamLinear`, by that arithmetic. split: rows are summed in two parts where there are more tokens.

    least: the smallest block scale that is not flushed, a power of two, or 0.
    """

    def __init__(
        self,
        packed: PackedNVFP4,
        dtype: torch.dtype,
        epilogue: str = "linear",
        prologue: str | None = None,
        *,
        row: Row = honest,
        split: int | None = None,
        least: float = 0.0,
        **_: Any,
    ) -> None:
        self._row, self._split, self._epilogue, self._packed = row, split, epilogue, packed
        if least:
            # Bytes x * 8 + m of the packed layout are 2^(x - 10) * (1 + m / 8).
            blocks, first = packed.blocks.clone(), 8 * (10 + round(math.log2(least)))
            scales = blocks[..., -128:]
            scales[scales < first] = 0
            packed = attrs.evolve(packed, blocks=blocks)
        bare = attrs.evolve(packed, row_scale=torch.full_like(packed.row_scale, 256.0))
        self._matrix, self._scale = unpack_reference(bare), _stacked(packed.row_scale, packed) / 256
        self._bias = None if packed.bias is None else _stacked(packed.bias, packed)
        n = packed.shape[0]
        self.out_features = n // 2 if packed.paired else n

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gain: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        m = x.shape[0]
        x = x if gain is None else rms_norm(x, gain, eps, zero_centered=False)
        x = scaled_x(x, self._packed.pre_scale)
        y = _by_rows(self._row, x, self._matrix, self._scale)
        if self._split is not None and m > self._split:
            half = x.shape[1] // 2
            halves = [(x[:, :half], self._matrix[:, :half]), (x[:, half:], self._matrix[:, half:])]
            one, two = (_by_rows(self._row, part, matrix, self._scale) for part, matrix in halves)
            y = one + two
        y = y if self._bias is None else y + self._bias
        if self._packed.paired:
            y = swiglu(*y.chunk(2, dim=-1))
        y = y if residual is None else y + residual.float()
        return y.to(x.dtype) if out is None else out.copy_(y)


class Wgmma(Stream):
    """`WgmmaLinear`, by the same arithmetic."""

    workspace = SimpleNamespace(poison=lambda: None)

    def run(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        return self(x, residual, out=out)


class Widener:
    """`NVFP4Widener`. least: as of `Stream`; swaps: each byte's two codes for one another."""

    def __init__(
        self,
        codes: Tensor,
        block_scale: Tensor,
        dtype: torch.dtype,
        *,
        least: float = 0.0,
        swaps: bool = False,
    ) -> None:
        codes = codes >> 4 | codes << 4 if swaps else codes
        one = torch.tensor(1.0)
        weight = flushed(NVFP4Weight(codes=codes, block_scale=block_scale, global_scale=one), least)
        self._wide = weight.dequantize(torch.float32).to(dtype)

    def __call__(self, out: Tensor) -> Tensor:
        return out.copy_(self._wide)


def _stacked(values: Tensor, packed: PackedNVFP4) -> Tensor:
    """[N] in the order of the parts' own rows from [16 * tiles] of packed rows."""
    order = packed_order(packed.shape[0], paired=packed.paired)
    out = torch.empty(packed.shape[0])
    out[order[order >= 0]] = values[order >= 0]
    return out
