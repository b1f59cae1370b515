"""How far apart two tensors are: differing elements, ULP, error against signal."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@attrs.define
class Distance:
    """Differing elements of two tensors, added up window by window.

    max_ulp: greatest distance in units in the last place of the common dtype (float32 where they differ), 0
    for codes and 8-bit scales, which are compared bit for bit. reciprocal: one side stores 1 / x.
    """

    elements: int = 0
    different: int = 0
    max_ulp: int = 0
    reciprocal: bool = False

    @property
    def same(self) -> bool:
        """Whether nothing differs; of a reciprocal, whether it is within 1 ULP (1 / (1 / x) need not be x)."""
        return self.different == 0 or (self.reciprocal and self.max_ulp <= 1)

    def add(self, first: Tensor, second: Tensor) -> None:
        """Compare two tensors of one shape: bits where the dtype is the same, else float32 values."""
        if first.dtype != second.dtype:
            first, second = first.to(torch.float32), second.to(torch.float32)
        one, two = _bits(first), _bits(second)
        self.elements += one.numel()
        if _equal(one, two):
            return
        self.different += int((one != two).sum())
        if first.dtype in _ULP_DTYPES:
            self.max_ulp = max(self.max_ulp, int((ordered(first) - ordered(second)).abs().max()))

    def add_reciprocal(self, multiplier: Tensor, divisor: Tensor) -> None:
        """Compare a multiplier with a divisor of the same shape, both float32: multiplier against 1 / divisor."""
        self.reciprocal = True
        self.add(multiplier, torch.ones_like(divisor) / divisor)


@attrs.define
class ValueDistance:
    """Dequantized float32 values of two weights, added up window by window."""

    elements: int = 0
    different: int = 0
    max_ulp: int = 0
    max_abs: float = 0.0
    _signal: float = 0.0
    _noise: float = 0.0

    @property
    def snr_db(self) -> float | None:
        """10 log10(sum of squares of the first / sum of squared differences); None where nothing differs."""
        if self._noise == 0:
            return None
        return 10 * math.log10(self._signal / self._noise) if self._signal > 0 else -math.inf

    def add(self, first: Tensor, second: Tensor) -> None:
        """first, second: float32 of one shape. Zeros of both signs are equal."""
        self.elements += first.numel()
        self._signal += _sum_of_squares(first)
        if torch.equal(first, second):
            return
        error = first - second
        self.different += int((error != 0).sum())
        self.max_ulp = max(self.max_ulp, int((ordered(first) - ordered(second)).abs().max()))
        self.max_abs = max(self.max_abs, float(error.abs().max()))
        self._noise += _sum_of_squares(error)


def ordered(values: Tensor) -> Tensor:
    """Floats as int64 whose differences count representable values between them; -0 and 0 are both 0."""
    bits = _bits(values).to(torch.int64)
    lowest = -(1 << (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def _equal(one: Tensor, two: Tensor) -> bool:
    """Whether two integer tensors of one shape are equal; eight bytes at a time where they divide by eight."""
    if one.numel() * one.element_size() % 8 == 0 and one.storage_offset() == two.storage_offset() == 0:
        one, two = one.reshape(-1).view(torch.int64), two.reshape(-1).view(torch.int64)
    return torch.equal(one, two)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(_INTEGER[values.element_size()])


def _sum_of_squares(values: Tensor) -> float:
    # In float64: squares of small weights would underflow, and sums of many lose digits.
    return float(values.to(torch.float64).square().sum())
