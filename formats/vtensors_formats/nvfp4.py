"""NVFP4 weights: E2M1 codes, an E4M3 scale per 16 (or 32) elements of K, a float32 global scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs
import torch
from torch import Tensor

from vtensors.errors import ClaimError, RequestError
from vtensors_formats import e2m1, e4m3
from vtensors_formats.arithmetic import divide
from vtensors_formats.groups import split_groups
from vtensors_formats.values import first_index, refusal, require_positive, tensor_name, zero_scale_refusal
from vtensors_formats.weight import Weight, cut_rows

GROUP = 16
# nvidia-modelopt 0.47 also writes 32: W4A8_NVFP4_FP8 and recipes with block size 32 (nvfp4_bs32).
GROUPS = (16, 32)


@attrs.frozen(kw_only=True, eq=False)
class NVFP4Weight(Weight):
    """W[n, k] = e2m1(codes[n, k]) * (block_scale[n, k // G] * global), in float32 and in this order.

    codes: [N, K // 2] uint8, low nibble = even k.
    block_scale: [N, K // G] float8_e4m3fn, row-major (not swizzled); G is 16 or 32, and its shape tells which.
    Exactly one of
    global_scale: [] or [N, 1] float32, multiplies the block scale (nvidia-modelopt 0.47 `weight_scale_2`,
    qtensor/nvfp4_tensor.py), and
    global_divisor: [] or [N, 1] float32, divides it (compressed-tensors 0.19 `weight_global_scale`,
    quantization/lifecycle/forward_helpers.py). 1 / divisor is not exact, so the stored number and its sense
    are kept.
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor | None = None
    global_divisor: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        if (self.global_scale is None) == (self.global_divisor is None):
            raise ClaimError(
                "an NVFP4 weight needs one global scale",
                seen="both, or neither",
                accepted="exactly one of a multiplier (global_scale) and a divisor (global_divisor)",
            )
        n, half = self.codes.shape
        wanted: list[tuple[int, ...]] = [(n, half * 2 // group) for group in GROUPS if half * 2 % group == 0]
        _require("codes", self.codes, [(n, half)], torch.uint8)
        if half * 2 % GROUP:
            raise ClaimError(
                "NVFP4 needs whole groups along K", seen=f"K = {half * 2}", accepted="a multiple of 16"
            )
        _require("block scale", self.block_scale, wanted, torch.float8_e4m3fn)
        _require("global scale", self._stored_global(), [(), (n, 1)], torch.float32)

    @property
    def scheme(self) -> str:
        """`nvfp4`."""
        return "nvfp4"

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def group(self) -> int:
        """G: elements of K per block scale, 16 or 32."""
        columns = self.block_scale.shape[1]
        return self.shape[1] // columns if columns else GROUP

    def stored(self) -> tuple[Tensor, ...]:
        """Codes, block scale, global scale or divisor."""
        return self.codes, self.block_scale, self._stored_global()

    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop as a view; a per-row global scale is cut too."""
        self.check_rows(start, stop)
        return attrs.evolve(
            self,
            codes=self.codes[start:stop],
            block_scale=self.block_scale[start:stop],
            global_scale=cut_rows(self.global_scale, start, stop),
            global_divisor=cut_rows(self.global_divisor, start, stop),
            bias=cut_rows(self.bias, start, stop),
        )

    def dequantize_float32(self) -> Tensor:
        """float32 [N, K]."""
        scale = e4m3.decode(self.block_scale)
        scale = scale * self.global_scale if self.global_scale is not None else scale / self._stored_global()
        values = e2m1.decode(self.codes)
        split_groups(values, self.group).mul_(scale.unsqueeze(-1))
        return values

    def check_codes_and_scales(self, names: Mapping[str, str]) -> None:
        """Refuses a global scale that is not finite and positive, NaN or negative block scales, and zero
        block scales over codes that are not zero. The codes are only read where a block scale is zero: every
        code is legal.
        """
        tensor = tensor_name(names, "global_scale")
        require_positive(
            self._stored_global(),
            tensor=tensor,
            what="global scale",
            largest=e2m1.MAX * e4m3.MAX,
            divides=self.global_scale is None,
        )
        tensor = tensor_name(names, "block_scale")
        stored = e4m3.as_bytes(self.block_scale)
        if stored.numel() == 0:
            return
        low, high = (int(bound) for bound in torch.aminmax(stored))
        # Positive and finite E4M3 is 0x01..0x7E; 0x80 is -0, which counts as zero.
        if low > 0 and high < 0x7F:
            return
        index = first_index((stored >= 0x7F) & (stored != 0x80))
        if index is not None:
            value = float(e4m3.decode(stored[index].reshape(1)))
            problem = "block scale is negative" if value < 0 else "block scale is NaN"
            accepted = "finite values, zero or more"
            raise refusal(problem, tensor=tensor, index=index, value=repr(value), accepted=accepted)
        blocks = split_groups(self.codes, self.group // 2)
        # 0x77 masks both sign bits away: a code of -0 is zero.
        index = first_index(e4m3.is_zero(stored) & ((blocks & 0x77) != 0).any(-1))
        if index is not None:
            raise zero_scale_refusal(tensor=tensor, what="block scale", index=index)

    def _stored_global(self) -> Tensor:
        stored = self.global_scale if self.global_scale is not None else self.global_divisor
        if stored is None:
            raise ClaimError(
                "an NVFP4 weight needs one global scale",
                seen="both, or neither",
                accepted="exactly one of a multiplier (global_scale) and a divisor (global_divisor)",
            )
        return stored


def quantize_nvfp4(weight: Tensor, global_scale: Tensor | None = None) -> NVFP4Weight:
    """An NVFP4Weight as nvidia-modelopt 0.47 makes it (qtensor/nvfp4_tensor.py).

    weight: [N, K] float, K % 16 = 0. global_scale: [] float32 multiplier g; None = amax / 2688.
    Per group s = e4m3(clamp(amax / (6 * g), 2^-9, 448)), s = 1 where amax = 0; code = e2m1(w / (s * g)).
    A matrix of zeros gets g = 1. Raises RequestError on another shape or values that are not finite.
    """
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        seen = f"shape {list(weight.shape)}"
        raise RequestError("cannot be quantized to NVFP4", seen=seen, accepted="[N, K], K a multiple of 16")
    values = split_groups(weight.to(torch.float32).contiguous(), GROUP)
    amax = values.abs().amax(-1)
    largest = amax.max()
    if not bool(torch.isfinite(largest)):
        raise RequestError(
            "cannot be quantized to NVFP4", seen=f"largest value {float(largest)}", accepted="finite"
        )
    if global_scale is None:
        global_scale = divide(largest, e2m1.MAX * e4m3.MAX)
    if float(global_scale) == 0.0:
        global_scale = torch.ones_like(global_scale)
    scale = amax / (e2m1.MAX * global_scale)
    scale = torch.where(scale == 0, 1.0, scale).clamp(min=e4m3.MIN_SUBNORMAL)
    block_scale = e4m3.encode(scale)
    # Adding zero turns -0.0 into 0.0, whose code modelopt writes without a sign.
    scaled = values / (e4m3.decode(block_scale) * global_scale).unsqueeze(-1) + 0.0
    codes = e2m1.pack(e2m1.encode(scaled).flatten(-2))
    return NVFP4Weight(codes=codes, block_scale=block_scale, global_scale=global_scale)


def _require(what: str, tensor: Tensor, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) not in shapes or tensor.dtype != dtype:
        raise ClaimError(
            f"the {what} of an NVFP4 weight does not fit",
            seen=f"{tensor.dtype} {list(tensor.shape)}",
            accepted=f"{dtype} " + " or ".join(str(list(shape)) for shape in shapes),
        )
