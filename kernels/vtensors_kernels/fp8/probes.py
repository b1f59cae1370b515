"""FP8 and MXFP8 kernels launched on small random weights, as bound for a request, against the reference.

Outputs start as NaN. Tolerances are those of the NVFP4 kernels; rows of a block-scaled weight that are widened round
once more, each weight by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import FP8Weight, MXFP8Weight, e4m3
from vtensors_kernels.arguments import scaled_x
from vtensors_kernels.fp8.packed import PackedFP8
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.scales import FP8
from vtensors_kernels.nvfp4 import packed_widening
from vtensors_kernels.probing import ROWS, TOLERANCES, random_x
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.swiglu import swiglu

_WIDENING_TOKENS = 67
_BLOCK = (128, 128)
_ROUNDINGS = 2


def random_fp8(request: KernelRequest, rows: int, *, seed: int = 0, scale_factor: float = 1.0) -> FP8:
    """[rows, K] on the request's device: every finite code, scales of the request's scheme and its traits.

    Products with `random_x` are about scale_factor: normal numbers of either 16-bit format at any K.
    """
    if request.shape is None:
        raise RequestError("a probe needs the weight's shape", seen=repr(request))
    k = request.shape[1]
    source = torch.Generator().manual_seed(seed * 1_000_003 + k)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    codes = every[torch.randint(0, len(every), (rows, k), generator=source)].view(torch.float8_e4m3fn)
    size = scale_factor / float((e4m3.decode(every.view(torch.float8_e4m3fn)).square().mean() * k).sqrt())
    weight: FP8
    if request.scheme == "mxfp8":
        top = round(float(torch.tensor(size).log2()))
        exponents = torch.randint(top + 127 - 9, top + 128, (rows, k // 32), generator=source)
        weight = MXFP8Weight(codes=codes, scale=exponents.to(torch.uint8))
    else:
        block = _BLOCK if request.scheme == "fp8-block" else None
        shape: tuple[int, ...] = (rows, 1) if request.scheme == "fp8-row" else ()
        if block is not None:
            shape = (-(-rows // block[0]), -(-k // block[1]))
        count = int(torch.tensor(shape).prod())
        scale = torch.linspace(0.5, 1.5, count).reshape(shape) if shape else torch.ones(())
        weight = FP8Weight(codes=codes, scale=scale * size, block=block)
    if "bias" in request.traits:
        weight = attrs.evolve(weight, bias=torch.linspace(-0.1, 0.1, rows))
    if "pre_scale" in request.traits:
        weight = attrs.evolve(weight, pre_scale=torch.linspace(0.5, 1.5, k))
    return weight.to(request.device)


def check_packed(packed: PackedFP8, parts: Sequence[FP8]) -> None:
    """Raises VtensorsError unless a repacked matrix is that of the reference, byte for byte."""
    wanted = pack_fp8_reference([part.to("cpu") for part in parts], paired=packed.paired)
    for ours, theirs, what in (
        (packed.blocks, wanted.blocks, "bytes"),
        (packed.row_scale, wanted.row_scale, "scales"),
    ):
        if not torch.equal(ours.cpu(), theirs):
            different = int((ours.cpu() != theirs).sum())
            raise VtensorsError(
                f"the self-test failed: the repacked {what} differ", seen=f"{different} of {theirs.numel()}"
            )


def repeat_rows(weight: FP8) -> None:
    """The second half of the rows becomes the first, in place: every value of a product is there twice."""
    n = weight.shape[0]
    half = n // 2
    for tensor in (*weight.stored(), *(() if weight.bias is None else (weight.bias,))):
        if tensor.ndim and tensor.shape[0] == n:
            plain = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            plain[half : 2 * half] = plain[:half].clone()
        elif tensor.ndim:
            tensor[:] = tensor[:1].clone()


def reference(x: Tensor, weight: FP8) -> Tensor:
    """float32 [M, N]: the reference linear on x after its pre-scale, which rounds to x's dtype, not rounded after."""
    return linear(scaled_x(x, weight.pre_scale).float(), attrs.evolve(weight, pre_scale=None))


def probe_packed_widening(request: KernelRequest) -> None:
    """The repack and `packed_widening` for the request's op: linear, linears, linear_swiglu or linear_add.

    Parts of one scale take another path than parts of several; both are tried.
    """
    paired = request.op == "linear_swiglu"
    count = 2 if paired else max(1, len(request.parts))
    rows = ROWS if request.scheme != "fp8-block" or paired or count == 1 else ROWS // 4 * 4
    for factor in (1.0, 0.75):
        parts = [random_fp8(request, rows, seed=i, scale_factor=factor**i) for i in range(count)]
        packed = pack_fp8(parts, paired=paired)
        check_packed(packed, parts)
        _probe_widening(request, packed, parts)


def _probe_widening(request: KernelRequest, packed: PackedFP8, parts: list[FP8]) -> None:
    dtype: torch.dtype = getattr(torch, request.dtype)
    x = random_x(request, _WIDENING_TOKENS)
    sums = [reference(x, part) for part in parts]
    if packed.paired:
        wanted = swiglu(sums[0], sums[1])
        out = _poisoned(wanted, dtype)
        ours = packed_widening.bind_linear_swiglu(packed, dtype)(x, out=out)
        roundings = 1 + _ROUNDINGS
    else:
        wanted, roundings = torch.cat(sums, dim=-1), _ROUNDINGS
        out = _poisoned(wanted, dtype)
        if request.op == "linear_add":
            residual = torch.linspace(-2, 2, wanted.numel(), device=x.device).reshape(wanted.shape).to(dtype)
            ours = packed_widening.bind_linear_add(packed, dtype)(x, residual, out=out)
            wanted = wanted + residual.float()
        else:
            ours = packed_widening.bind_linear(packed, dtype)(x, out=out)
    error = float((ours.float() - wanted).norm() / wanted.norm())
    accepted = TOLERANCES[dtype] * roundings
    # Written so that NaN fails.
    if not error < accepted:
        raise VtensorsError(
            f"the self-test failed: {request.op}", seen=f"relative error {error:.1e}", accepted=f"{accepted}"
        )


def _poisoned(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(like.shape, float("nan"), dtype=dtype, device=like.device)
