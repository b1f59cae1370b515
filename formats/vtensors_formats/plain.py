"""Weights that are not quantized: bfloat16, float16 or float32 tensors of any rank, as stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs
import torch
from torch import Tensor

from vtensors.errors import ClaimError
from vtensors_formats.weight import Weight, cut_rows

_SCHEMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@attrs.frozen(kw_only=True, eq=False)
class PlainWeight(Weight):
    """tensor: any shape, bfloat16, float16 or float32; kept as it is (a view of the mapped file, say)."""

    tensor: Tensor

    def __attrs_post_init__(self) -> None:
        if self.tensor.dtype not in _SCHEMES:
            raise ClaimError(
                "an unquantized weight has a dtype that is none",
                seen=str(self.tensor.dtype),
                accepted=", ".join(str(dtype) for dtype in _SCHEMES),
            )

    @property
    def scheme(self) -> str:
        """`bf16`, `f16` or `f32`."""
        return _SCHEMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's own shape."""
        return tuple(self.tensor.shape)

    def stored(self) -> tuple[Tensor, ...]:
        """The tensor."""
        return (self.tensor,)

    def rows(self, start: int, stop: int) -> Self:
        """Entries start..stop of the first dimension, a view."""
        self.check_rows(start, stop)
        return attrs.evolve(self, tensor=self.tensor[start:stop], bias=cut_rows(self.bias, start, stop))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor in dtype; the very tensor, not a copy, where dtype is its own."""
        return self.tensor.to(dtype)

    def dequantize_float32(self) -> Tensor:
        """The tensor as float32."""
        return self.tensor.to(torch.float32)

    def check_codes_and_scales(self, names: Mapping[str, str]) -> None:
        """Nothing: there are no codes and no scales."""
