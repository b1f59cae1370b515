"""MXFP8 weights: E4M3 codes and an E8M0 scale per 32 elements of K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs
import torch
from torch import Tensor

from vtensors.errors import ClaimError, RequestError
from vtensors_formats import e4m3, e8m0
from vtensors_formats.groups import split_groups
from vtensors_formats.values import refusal, tensor_name
from vtensors_formats.weight import Weight, cut_rows

GROUP = 32
# 448 * 2^(b - 127) is finite in float32 up to this byte b.
_MOST = 0xF6


@attrs.frozen(kw_only=True, eq=False)
class MXFP8Weight(Weight):
    """W[n, k] = e4m3(codes[n, k]) * 2^(scale[n, k // 32] - 127), in float32 (OCP Microscaling Formats v1.0).

    codes: [N, K] float8_e4m3fn. scale: [N, K // 32] E8M0 bytes, uint8 or float8_e8m0fnu, never cast.
    """

    codes: Tensor
    scale: Tensor

    def __attrs_post_init__(self) -> None:
        n, k = self.codes.shape
        fits = k % GROUP == 0 and tuple(self.scale.shape) == (n, k // GROUP)
        if not fits or self.codes.dtype != torch.float8_e4m3fn or self.scale.dtype not in e8m0.DTYPES:
            raise ClaimError(
                "the parts of an MXFP8 weight do not fit",
                seen=f"codes {self.codes.dtype} {[n, k]}, scale {self.scale.dtype} {list(self.scale.shape)}",
                accepted="codes torch.float8_e4m3fn [N, K], scale torch.uint8 or float8_e8m0fnu [N, K / 32]",
            )

    @property
    def scheme(self) -> str:
        """`mxfp8`."""
        return "mxfp8"

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def stored(self) -> tuple[Tensor, ...]:
        """Codes and scale."""
        return self.codes, self.scale

    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop as a view."""
        self.check_rows(start, stop)
        return attrs.evolve(
            self,
            codes=self.codes[start:stop],
            scale=self.scale[start:stop],
            bias=cut_rows(self.bias, start, stop),
        )

    def dequantize_float32(self) -> Tensor:
        """float32 [N, K]."""
        values = e4m3.decode(self.codes)
        split_groups(values, GROUP).mul_(e8m0.decode(self.scale).unsqueeze(-1))
        return values

    def check_codes_and_scales(self, names: Mapping[str, str]) -> None:
        """Refuses NaN codes, NaN (0xFF) scales and those that no float32 weight can have; E8M0 has no zero and
        no sign.
        """
        index = e4m3.first_nan(self.codes)
        if index is not None:
            tensor = tensor_name(names, "codes")
            raise refusal(
                "a code is NaN", tensor=tensor, index=index, value="nan", accepted="finite E4M3 codes"
            )
        index = e8m0.first_above(self.scale, _MOST)
        if index is not None:
            byte = int(e8m0.as_bytes(self.scale)[index])
            is_nan = byte == e8m0.NAN_BYTE
            raise refusal(
                "an E8M0 scale is NaN"
                if is_nan
                else "an E8M0 scale gives weights that are infinite in float32",
                tensor=tensor_name(names, "scale"),
                index=index,
                value=f"byte 0x{byte:02X}" + ("" if is_nan else f", 2^{byte - 127}"),
                accepted=f"bytes 0x00 to 0x{_MOST:02X}",
            )


def quantize_mxfp8(weight: Tensor, rule: e8m0.ExponentRule = e8m0.ExponentRule.CEIL) -> MXFP8Weight:
    """An MXFP8Weight of [N, K] float with K % 32 = 0; rule as in `e8m0.encode`, CEIL being nvidia-modelopt's.

    code = e4m3(clamp(w * 2^(127 - b), +-448)). Raises RequestError on another shape.
    """
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        seen = f"shape {list(weight.shape)}"
        raise RequestError("cannot be quantized to MXFP8", seen=seen, accepted="[N, K], K a multiple of 32")
    values = split_groups(weight.to(torch.float32).contiguous(), GROUP)
    scale = e8m0.encode(values.abs().amax(-1), rule)
    codes = e4m3.encode(values * e8m0.reciprocal(scale).unsqueeze(-1))
    return MXFP8Weight(codes=codes.flatten(-2), scale=scale)
