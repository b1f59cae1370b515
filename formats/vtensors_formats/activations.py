"""Activation quantizers: what each convention does to a layer's input, as an exact reference.

Every quantizer computes in float32 whatever the dtype of x, as serving kernels do, and rounds the result once
to x's dtype. NaN is never lost: it makes its whole scale group NaN, or its element under a static scale. An
infinity saturates under a stored scale and makes its group NaN under a dynamic float32 one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs
import torch
from torch import Tensor

from vtensors.errors import ClaimError, RequestError
from vtensors_formats import e2m1, e4m3
from vtensors_formats.arithmetic import divide
from vtensors_formats.groups import join_groups, split_groups
from vtensors_formats.values import require_positive, tensor_name

NVFP4_GROUP = 16


@attrs.frozen(kw_only=True, eq=False)
class QuantizedActivation:
    """What a kernel's quantizer should produce.

    codes: [..., K] float8_e4m3fn, or [..., K // 2] uint8 packed E2M1 (low nibble = even k).
    scale: as stored for the matrix product: fp4 [..., K // 16] float8_e4m3fn, without the global scale;
    fp8-static [] float32; per token [..., 1] float32; per group [..., ceil(K / group)] float32;
    MXFP8 [..., K // 32] uint8 E8M0.
    """

    codes: Tensor
    scale: Tensor


@attrs.frozen(kw_only=True, eq=False)
class ActivationQuantizer(ABC):
    """Rounds a layer's input [..., K] to the grid that the checkpoint declares for it."""

    kind: ClassVar[str]
    """`fp4`, `fp8-static` or `fp8-dynamic`."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x quantized and dequantized; same shape and dtype. x: [..., K] float."""

    @abstractmethod
    def codes(self, x: Tensor) -> QuantizedActivation:
        """x quantized: codes and scales. x: [..., K] float."""

    def to(self, device: torch.device | str) -> Self:
        """The same quantizer with its stored scales, if it has any, on device."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in attrs.fields(type(self))
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return attrs.evolve(self, **moved) if moved else self

    @abstractmethod
    def check_values(self, names: Mapping[str, str]) -> None:
        """Raises WeightValueError unless the stored scales (role `input_scale`) are finite and above zero."""


@attrs.frozen(kw_only=True, eq=False)
class FP4Activation(ActivationQuantizer):
    """NVFP4 activations: E2M1 codes, an E4M3 scale per 16 elements of K, a stored global scale. K % 16 = 0.

    Exactly one of
    global_scale: [] float32 multiplier g (nvidia-modelopt `input_scale`, amax / 2688), and
    global_divisor: [] float32 divisor G (compressed-tensors `input_global_scale`, 2688 / amax).

    Per group, all in float32:
    g:  s = e4m3(min(amax / (6 * g), 448)), e = s * g
        (nvidia-modelopt 0.47, kernels/quantization/common/nvfp4_quant.py)
    G:  s = e4m3(min(G * (amax / 6), 448)), e = s / G
        (compressed-tensors 0.19, quantization/utils/helpers.py and lifecycle/forward_helpers.py)
    code = e2m1(x / e), result = e2m1 value * e.
    A group whose s rounds to zero gives zero codes and s = 0. compressed-tensors keeps 0.125 there, with the
    same zero result; modelopt's own simulation also flushes groups with e < 1e-5, which no FP4 kernel does.
    """

    kind: ClassVar[str] = "fp4"

    global_scale: Tensor | None = None
    global_divisor: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        if (self.global_scale is None) == (self.global_divisor is None):
            raise ClaimError(
                "an FP4 activation needs one global scale",
                seen="both, or neither",
                accepted="exactly one of a multiplier (global_scale) and a divisor (global_divisor)",
            )
        _require_scalar(self._stored_global())

    def __call__(self, x: Tensor) -> Tensor:
        """x quantized and dequantized; same shape and dtype. x: [..., K] float, K % 16 = 0."""
        codes, _, effective = self._quantize(x)
        return join_groups(e2m1.decode_codes(codes) * effective, x.shape[-1]).to(x.dtype)

    def codes(self, x: Tensor) -> QuantizedActivation:
        """codes [..., K // 2] uint8 packed, scale [..., K // 16] float8_e4m3fn. x as in a call."""
        codes, scale, _ = self._quantize(x)
        return QuantizedActivation(codes=e2m1.pack(codes.flatten(-2)), scale=scale)

    def check_values(self, names: Mapping[str, str]) -> None:
        """Raises WeightValueError unless the global scale is finite and above zero."""
        require_positive(self._stored_global(), tensor=tensor_name(names, "input_scale"), what="input scale")

    def _stored_global(self) -> Tensor:
        stored = self.global_scale if self.global_scale is not None else self.global_divisor
        if stored is None:
            raise ClaimError(
                "an FP4 activation needs one global scale",
                seen="both, or neither",
                accepted="exactly one of a multiplier (global_scale) and a divisor (global_divisor)",
            )
        return stored

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [..., K // 16, 16] uint8, s [..., K // 16] E4M3 and e [..., K // 16, 1] float32."""
        if x.shape[-1] % NVFP4_GROUP:
            raise RequestError(
                "FP4 activations need whole groups", seen=f"K = {x.shape[-1]}", accepted="a multiple of 16"
            )
        groups = split_groups(x.to(torch.float32).contiguous(), NVFP4_GROUP)
        amax = groups.abs().amax(-1)
        stored = self._stored_global()
        if self.global_scale is not None:
            scale = e4m3.encode(amax / (e2m1.MAX * stored))
            effective = e4m3.decode(scale) * stored
        else:
            scale = e4m3.encode(stored * divide(amax, e2m1.MAX))
            effective = e4m3.decode(scale) / stored
        effective = effective.unsqueeze(-1)
        scaled = torch.where(effective == 0, 0.0, groups / effective)
        return e2m1.encode(scaled), scale, effective


@attrs.frozen(kw_only=True, eq=False)
class FP8StaticActivation(ActivationQuantizer):
    """FP8 activations with one stored scale: code = e4m3(clamp(x / s, +-448)), result = code * s.

    scale: [] float32, or bfloat16 as compressed-tensors stores it (widened); amax / 448. Division, then
    clamp, as in nvidia-modelopt 0.47 (backends/fp8_per_tensor_gemm.py) and compressed-tensors 0.19
    (lifecycle/forward_helpers.py).
    """

    kind: ClassVar[str] = "fp8-static"

    scale: Tensor

    def __attrs_post_init__(self) -> None:
        _require_scalar(self.scale)

    def __call__(self, x: Tensor) -> Tensor:
        """x quantized and dequantized; same shape and dtype. x: [..., K] float."""
        quantized = self.codes(x)
        return (e4m3.decode(quantized.codes) * quantized.scale).to(x.dtype)

    def codes(self, x: Tensor) -> QuantizedActivation:
        """codes [..., K] float8_e4m3fn, scale [] float32. x: [..., K] float."""
        scale = self.scale.to(torch.float32)
        return QuantizedActivation(codes=e4m3.encode(x.to(torch.float32) / scale), scale=scale)

    def check_values(self, names: Mapping[str, str]) -> None:
        """Raises WeightValueError unless the scale is finite and above zero."""
        require_positive(self.scale, tensor=tensor_name(names, "input_scale"), what="input scale")


def _require_scalar(scale: Tensor) -> None:
    if scale.ndim:
        raise ClaimError(
            "an input scale must be one number", seen=f"shape {list(scale.shape)}", accepted="shape []"
        )
