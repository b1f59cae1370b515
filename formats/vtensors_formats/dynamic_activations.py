"""Activation quantizers whose scales follow from the activation itself; the checkpoint stores nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from vtensors_formats import e4m3, e8m0
from vtensors_formats.activations import ActivationQuantizer, QuantizedActivation
from vtensors_formats.arithmetic import divide
from vtensors_formats.groups import join_groups, padded_groups

MX_GROUP = 32

# compressed-tensors 0.19 puts float32's epsilon for a scale of zero (quantization/utils/helpers.py).
_ZERO_SCALE = 2.0**-23


@attrs.frozen(kw_only=True, eq=False)
class DynamicActivation(ActivationQuantizer):
    """What the dynamic quantizers share: kind `fp8-dynamic`, and no stored scale."""

    kind: ClassVar[str] = "fp8-dynamic"

    def check_values(self, names: Mapping[str, str]) -> None:
        """Nothing is stored, so nothing can be wrong."""


@attrs.frozen(kw_only=True, eq=False)
class FP8TokenActivation(DynamicActivation):
    """FP8 activations with a scale per token: s = amax / 448 over K, code = e4m3(clamp(x / s, +-448)).

    A token of zeros has s = 2^-23 and zero codes. compressed-tensors 0.19 (strategy `token`), nvidia-modelopt
    FP8_PER_CHANNEL_PER_TOKEN.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """x quantized and dequantized; same shape and dtype. x: [..., K] float."""
        quantized = self.codes(x)
        return (e4m3.decode(quantized.codes) * quantized.scale).to(x.dtype)

    def codes(self, x: Tensor) -> QuantizedActivation:
        """codes [..., K] float8_e4m3fn, scale [..., 1] float32. x: [..., K] float."""
        values = x.to(torch.float32)
        scale = _dynamic_scale(values)
        return QuantizedActivation(codes=e4m3.encode(values / scale), scale=scale)


@attrs.frozen(kw_only=True, eq=False)
class FP8GroupActivation(DynamicActivation):
    """FP8 activations with a scale per token and group of K: s = amax / 448, code = e4m3(clamp(x / s,
    +-448)).

    group: elements of K per scale; the last group may be partial. A group of zeros has s = 2^-23. The
    companion of block FP8 weights: compressed-tensors 0.19 (strategy `group`, dynamic), transformers 5.24
    fine-grained FP8, nvidia-modelopt FP8_PB_WO.
    """

    group: int = 128

    def __call__(self, x: Tensor) -> Tensor:
        """x quantized and dequantized; same shape and dtype. x: [..., K] float."""
        codes, scale = self._quantize(x)
        return join_groups(e4m3.decode(codes) * scale, x.shape[-1]).to(x.dtype)

    def codes(self, x: Tensor) -> QuantizedActivation:
        """codes [..., K] float8_e4m3fn, scale [..., ceil(K / group)] float32. x: [..., K] float."""
        codes, scale = self._quantize(x)
        return QuantizedActivation(codes=_joined_codes(codes, x.shape[-1]), scale=scale.squeeze(-1))

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = padded_groups(x, self.group)
        scale = _dynamic_scale(groups)
        return e4m3.encode(groups / scale), scale


@attrs.frozen(kw_only=True, eq=False)
class MXFP8Activation(DynamicActivation):
    """MXFP8 activations: an E8M0 scale 2^(b - 127) per 32 elements of K, code = e4m3(clamp(x * 2^(127 - b),
    +-448)).

    rule: how b follows from the group's amax; CEIL is nvidia-modelopt 0.47's (qtensor/mxfp8_tensor.py),
    FLOOR_ROUNDED compressed-tensors 0.19's. A group of zeros has b = 0.
    """

    rule: e8m0.ExponentRule = e8m0.ExponentRule.CEIL

    def __call__(self, x: Tensor) -> Tensor:
        """x quantized and dequantized; same shape and dtype. x: [..., K] float."""
        codes, scale = self._quantize(x)
        return join_groups(e4m3.decode(codes) * e8m0.decode(scale), x.shape[-1]).to(x.dtype)

    def codes(self, x: Tensor) -> QuantizedActivation:
        """codes [..., K] float8_e4m3fn, scale [..., ceil(K / 32)] uint8 E8M0. x: [..., K] float."""
        codes, scale = self._quantize(x)
        return QuantizedActivation(codes=_joined_codes(codes, x.shape[-1]), scale=scale.squeeze(-1))

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = padded_groups(x, MX_GROUP)
        scale = e8m0.encode(groups.abs().amax(-1, keepdim=True), self.rule)
        return e4m3.encode(groups * e8m0.reciprocal(scale)), scale


def _dynamic_scale(values: Tensor) -> Tensor:
    """amax / 448 over the last dimension, kept; 2^-23 where that is zero."""
    scale = divide(values.abs().amax(-1, keepdim=True), e4m3.MAX)
    return torch.where(scale == 0, _ZERO_SCALE, scale)


def _joined_codes(codes: Tensor, k: int) -> Tensor:
    """E4M3 groups [..., G, size] as [..., k]; cut as uint8, since not every backend can slice float8."""
    return join_groups(e4m3.as_bytes(codes), k).contiguous().view(torch.float8_e4m3fn)
