"""Encoders of the built-in schemes: values to codes and scales, some rows at a time, as publishers round.

A matrix that is encoded in pieces gives the bytes that it gives whole: only the largest magnitude of the
matrix is shared between rows, and that is handed in. torch is imported when values are touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from vtensors.errors import RequestError
from vtensors.records import EncodeOptions, Layout

if TYPE_CHECKING:
    from torch import Tensor

_MODELOPT, _COMPRESSED = "modelopt", "compressed-tensors"
# Largest block scale where a block may also put its largest value at 4: 448 / 1.5 rounds down to 256 in E4M3
# (nvidia-modelopt 0.47, four-over-six normalizes the global scale by 6 * 256).
_FOUR_OVER_SIX_MAX = 256.0
# Trial factors of the block scale for the least squared error; 1 first, so that ties keep it.
_MSE_FACTORS = (1.0, *(1.0 - step / 32 for step in range(1, 13)), 1.0625, 1.125)


def _matrix(shape: tuple[int, ...], multiple: int, scheme: str) -> tuple[int, int]:
    if len(shape) != 2 or shape[1] % multiple:
        rule = f"[N, K], K a multiple of {multiple}" if multiple > 1 else "[N, K]"
        raise RequestError(f"cannot be quantized to {scheme}", seen=f"shape {list(shape)}", accepted=rule)
    return shape[0], shape[1]


def _finite(rows: Tensor, scheme: str) -> Tensor:
    import torch

    values = rows.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise RequestError(
            f"cannot be quantized to {scheme}", seen="NaN or infinity", accepted="finite values"
        )
    return values


@attrs.frozen(kw_only=True)
class NVFP4Encoder:
    """`nvfp4` as nvidia-modelopt 0.47 makes it; optional searches of the block scale."""

    needs_amax: bool = True
    row_step: int = 1
    block: tuple[int, int] | None = None

    def layouts(self, shape: tuple[int, ...], options: EncodeOptions) -> Mapping[str, Layout]:
        """codes U8 [N, K/2], block_scale F8_E4M3 [N, K/16], global_scale F32 []."""
        n, k = _matrix(shape, 16, "nvfp4")
        return {
            "codes": Layout(dtype="U8", shape=(n, k // 2)),
            "block_scale": Layout(dtype="F8_E4M3", shape=(n, k // 16)),
            "global_scale": Layout(dtype="F32", shape=()),
        }

    def encode(self, rows: Tensor, amax: Tensor | None, options: EncodeOptions) -> Mapping[str, Tensor]:
        """The roles of these rows; global_scale = amax / 2688, or amax / 1536 with four-over-six."""
        import torch

        from vtensors_formats import e2m1, e4m3
        from vtensors_formats.arithmetic import divide
        from vtensors_formats.nvfp4 import quantize_nvfp4

        values = _finite(rows, "nvfp4")
        largest = values.abs().max() if amax is None else amax
        top = _FOUR_OVER_SIX_MAX if options.four_over_six else e4m3.MAX
        scale = divide(largest.to(torch.float32), e2m1.MAX * top)
        scale = torch.where(scale == 0, 1.0, scale)
        if options.mse or options.four_over_six:
            return _searched(values, scale, _factors(options))
        weight = quantize_nvfp4(values, scale)
        return {"codes": weight.codes, "block_scale": weight.block_scale, "global_scale": scale}


def _factors(options: EncodeOptions) -> tuple[float, ...]:
    factors = _MSE_FACTORS if options.mse else (1.0,)
    if not options.four_over_six:
        return factors
    return (*factors, *(1.5 * factor for factor in factors))


def _searched(values: Tensor, global_scale: Tensor, factors: tuple[float, ...]) -> Mapping[str, Tensor]:
    """Per block of 16 the E4M3 scale among the trials whose codes have the least squared error."""
    import torch

    from vtensors_formats import e2m1, e4m3
    from vtensors_formats.groups import split_groups

    groups = split_groups(values.contiguous(), 16)
    base = groups.abs().amax(-1) / (e2m1.MAX * global_scale)
    base = torch.where(base == 0, 1.0, base)
    best_scale = best_codes = best_error = None
    for factor in factors:
        block = e4m3.encode((base * factor).clamp(min=e4m3.MIN_SUBNORMAL))
        step = (e4m3.decode(block) * global_scale).unsqueeze(-1)
        codes = e2m1.encode(groups / step + 0.0)
        error = (e2m1.decode_codes(codes) * step - groups).square_().sum(-1)
        if best_scale is None or best_codes is None or best_error is None:
            best_scale, best_codes, best_error = e4m3.as_bytes(block), codes, error
            continue
        better = error < best_error
        best_scale = torch.where(better, e4m3.as_bytes(block), best_scale)
        best_codes = torch.where(better.unsqueeze(-1), codes, best_codes)
        best_error = torch.where(better, error, best_error)
    if best_scale is None or best_codes is None:
        raise RequestError("no trial factor for the block scale")
    return {
        "codes": e2m1.pack(best_codes.flatten(-2)),
        "block_scale": best_scale.view(torch.float8_e4m3fn),
        "global_scale": global_scale,
    }


@attrs.frozen(kw_only=True)
class FP8Encoder:
    """`fp8-tensor`, `fp8-row` and `fp8-block`: scale = amax / 448, code = e4m3(w / scale).

    arithmetic `modelopt`: a 16-bit matrix under one scale is divided in its own dtype, so that the quotient is
    rounded twice (nvidia-modelopt 0.47, export/quant_utils.py `to_quantized_weight`: a tensor over a scalar
    keeps the tensor's dtype); rows and blocks are divided in float32.
    arithmetic `compressed-tensors`: scales are stored in the matrix' own dtype and the quotient is rounded to
    it (compressed-tensors 0.19, quantization/lifecycle/forward.py).
    """

    scheme: str
    needs_amax: bool = False
    row_step: int = 1
    block: tuple[int, int] | None = None

    def layouts(self, shape: tuple[int, ...], options: EncodeOptions) -> Mapping[str, Layout]:
        """codes F8_E4M3 [N, K]; scale F32 (BF16 with compressed-tensors' arithmetic) [], [N, 1] or the grid."""
        n, k = _matrix(shape, 1, self.scheme)
        scale: tuple[int, ...] = () if self.needs_amax else (n, 1)
        if self.block is not None:
            scale = (-(-n // self.block[0]), -(-k // self.block[1]))
        dtype = "BF16" if options.arithmetic == _COMPRESSED else "F32"
        return {"codes": Layout(dtype="F8_E4M3", shape=(n, k)), "scale": Layout(dtype=dtype, shape=scale)}

    def encode(self, rows: Tensor, amax: Tensor | None, options: EncodeOptions) -> Mapping[str, Tensor]:
        """The roles of these rows."""
        import torch

        from vtensors_formats import e4m3
        from vtensors_formats.arithmetic import divide

        values = _finite(rows, self.scheme)
        if self.needs_amax:
            largest = values.abs().max() if amax is None else amax.to(torch.float32)
        elif self.block is None:
            largest = values.abs().amax(1, keepdim=True)
        else:
            largest = _block_amax(values, self.block)
        scale = divide(largest, e4m3.MAX)
        if options.arithmetic == _COMPRESSED:
            scale = scale.to(torch.bfloat16).to(torch.float32)
        scale = torch.where(scale == 0, 1.0, scale)
        quotient = values / (scale if self.block is None else _spread(scale, self.block, values.shape))
        narrow = options.arithmetic == _COMPRESSED or (options.arithmetic == _MODELOPT and self.needs_amax)
        if narrow and rows.dtype in (torch.bfloat16, torch.float16):
            quotient = quotient.to(rows.dtype)
        stored = scale.to(torch.bfloat16) if options.arithmetic == _COMPRESSED else scale
        return {"codes": e4m3.encode(quotient), "scale": stored}


def _block_amax(values: Tensor, block: tuple[int, int]) -> Tensor:
    import torch

    n, k = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, -k % block[1], 0, -n % block[0]))
    return padded.view(-(-n // block[0]), block[0], -(-k // block[1]), block[1]).amax((1, 3))


def _spread(scale: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    rows = scale.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


@attrs.frozen(kw_only=True)
class MXFP8Encoder:
    """`mxfp8` with nvidia-modelopt's rounding of the exponent."""

    needs_amax: bool = False
    row_step: int = 1
    block: tuple[int, int] | None = None

    def layouts(self, shape: tuple[int, ...], options: EncodeOptions) -> Mapping[str, Layout]:
        """codes F8_E4M3 [N, K], scale U8 [N, K/32]."""
        n, k = _matrix(shape, 32, "mxfp8")
        return {
            "codes": Layout(dtype="F8_E4M3", shape=(n, k)),
            "scale": Layout(dtype="U8", shape=(n, k // 32)),
        }

    def encode(self, rows: Tensor, amax: Tensor | None, options: EncodeOptions) -> Mapping[str, Tensor]:
        """The roles of these rows."""
        import torch

        from vtensors_formats.mxfp8 import quantize_mxfp8

        weight = quantize_mxfp8(_finite(rows, "mxfp8"))
        return {"codes": weight.codes, "scale": weight.scale.view(torch.uint8)}


NVFP4 = NVFP4Encoder()
FP8_TENSOR = FP8Encoder(scheme="fp8-tensor", needs_amax=True)
FP8_ROW = FP8Encoder(scheme="fp8-row")
FP8_BLOCK = FP8Encoder(scheme="fp8-block", row_step=128, block=(128, 128))
MXFP8 = MXFP8Encoder()
