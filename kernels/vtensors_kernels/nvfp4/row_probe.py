"""Weights for every NVFP4 self-test whose rows differ in size: block scales of one binade a row, all of E4M3's.

Each row is judged by its own norm: in a norm over all scales the small ones do not show, flushed to zero or not.
Inputs are so large that sums of the largest rows overflow float16 at any K unless the global scale comes before the
rounding, even where a kernel took 2^-8 out of the block scales; the outputs are within 2^-6 .. 2^15.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.arguments import scaled_x
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

# One for each positive block scale at the least, and a tail.
ROWS = 132
# So many that no row's silu is of negative numbers alone, nor its norm small by chance.
TOKENS = 32
EPS = 1e-6
# Of 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
MEAN_SQUARE_OF_CODES = 8.5625
# E4M3 (OCP FP8): bytes 0x01..0x7E are positive numbers in 18 binades, three of them subnormal, 8 bytes each above.
_SCALES, _SUBNORMAL, _TOP = 126, 8, 0x78
_SMALLEST_SCALE = 2.0**-9
# The stride shares no divisor with 126: neighbours differ in size. The step shares none with sizes of binades.
_ROW_STRIDE, _GROUP_STEP = 55, 3
_LARGEST_X, _SMALLEST_ROW = 2.0**14, 2.0**-6


@attrs.frozen(kw_only=True, eq=False)
class RowCase:
    """parts: [rows, K] each. x: [T, K] of the request's dtype; gain: [K] float32 of a norm before, or None.

    residual: [T, columns] of the dtype for `linear_add`, in proportion to each row, or None.
    wanted: float32 [T, columns] of the reference for the request's op, residual included, not rounded.
    """

    parts: tuple[NVFP4Weight, ...]
    x: Tensor
    gain: Tensor | None
    residual: Tensor | None
    wanted: Tensor

    @classmethod
    def make(
        cls, request: KernelRequest, *, rows: int = ROWS, tokens: int = TOKENS, factor: float = 1.0
    ) -> RowCase:
        """For the request's op, K, traits and number of parts, on its device; `linear_argmax` counts as `linear`.

        rows: of each part. tokens: T. factor: between the outputs of one part and the next.
        """
        paired = request.op.endswith("swiglu")
        count = 2 if paired else max(1, len(request.parts))
        parts = tuple(
            # Small rows of up beside large ones of gate.
            row_weight(request, rows, seed=i, factor=factor**i, reverse=paired and i == 1)
            for i in range(count)
        )
        gain, k = None, parts[0].shape[1]
        uniform = torch.rand(tokens, k, generator=torch.Generator().manual_seed(k)) * 2 - 1
        if request.op.startswith("norm_"):
            gain = (torch.linspace(0.5, 1.5, k) * _LARGEST_X / 3**0.5).to(request.device)
        else:
            uniform = uniform * _LARGEST_X
        x = uniform.to(getattr(torch, request.dtype)).to(request.device)
        normed = x if gain is None else rms_norm(x, gain, EPS, zero_centered=False)
        sums = [reference(normed, part) for part in parts]
        wanted, residual = swiglu(*sums) if paired else torch.cat(sums, dim=-1), None
        if request.op == "linear_add":
            between = torch.linspace(-2, 2, wanted.numel(), device=x.device).reshape(wanted.shape)
            residual = (between * wanted.square().mean(0).sqrt()).to(x.dtype)
            wanted = wanted + residual.float()
        return cls(parts=parts, x=x, gain=gain, residual=residual, wanted=wanted)

    def check(self, y: Tensor, accepted: float, what: str) -> None:
        """Raises VtensorsError unless each column of y [T, columns] is off by less than that of its own norm."""
        errors = (y.float() - self.wanted).norm(dim=0) / self.wanted.norm(dim=0)
        # Written so that NaN fails.
        if bool((errors < accepted).all()):
            return
        column = int(torch.nan_to_num(errors, nan=float("inf")).argmax())
        part, row = divmod(column, self.parts[0].shape[0])
        scales = self.parts[part].block_scale[row].float()
        raise VtensorsError(
            f"the self-test failed: {what}",
            seen=f"relative error {float(errors[column]):.1e} in a row of block scales "
            f"{float(scales.min()):g} .. {float(scales.max()):g}",
            accepted=f"{accepted}",
        )


def row_weight(
    request: KernelRequest, rows: int, *, seed: int = 0, factor: float = 1.0, reverse: bool = False
) -> NVFP4Weight:
    """[rows, K] on the request's device: random codes, block scales of one binade a row, the request's traits.

    126 rows have every positive scale, at any K. Products with `RowCase.x` are about factor * 2^-6 in rows of the
    smallest scale and 2^18 times that in those of the largest. reverse: large rows where small ones would be.
    """
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    k, group = request.shape[1], 32 if "group32" in request.traits else 16
    source = torch.Generator().manual_seed(seed * 1_000_003 + k)
    first = torch.arange(rows) * _ROW_STRIDE % _SCALES + 1
    scales = _binade_bytes(_SCALES + 1 - first if reverse else first, k // group)
    block_scale = scales.to(torch.uint8).view(torch.float8_e4m3fn)
    smallest = (k * MEAN_SQUARE_OF_CODES / 3) ** 0.5 * _LARGEST_X * _SMALLEST_SCALE
    scale = torch.tensor(factor * _SMALLEST_ROW / smallest)
    if "row_scale" in request.traits:
        scale = scale * torch.linspace(0.5, 1.5, rows).reshape(rows, 1)
    weight = NVFP4Weight(
        codes=torch.randint(0, 256, (rows, k // 2), generator=source, dtype=torch.uint8),
        block_scale=block_scale,
        global_scale=scale,
    )
    if "bias" in request.traits:
        sizes = block_scale[:, 0].float() * scale.reshape(-1) * (smallest / _SMALLEST_SCALE)
        weight = attrs.evolve(weight, bias=torch.linspace(-0.5, 0.5, rows) * sizes)
    if "pre_scale" in request.traits:
        weight = attrs.evolve(weight, pre_scale=torch.linspace(0.5, 1.5, k))
    return weight.to(request.device)


def reference(x: Tensor, weight: NVFP4Weight) -> Tensor:
    """float32 [M, N]: the reference linear on x after its pre-scale, which rounds to x's dtype, not rounded after."""
    return linear(scaled_x(x, weight.pre_scale).float(), attrs.evolve(weight, pre_scale=None))


def _binade_bytes(first: Tensor, groups: int) -> Tensor:
    """[rows, groups]: the binade of each byte of `first` [rows] from that byte on, around and around."""
    low = torch.where(first < _SUBNORMAL, 2 ** first.float().log2().floor().long(), first // 8 * 8)
    size = torch.where(first < _SUBNORMAL, low, torch.where(first < _TOP, 8, _SCALES + 1 - _TOP))
    steps = (first - low).unsqueeze(-1) + torch.arange(groups) * _GROUP_STEP
    return low.unsqueeze(-1) + steps % size.unsqueeze(-1)
