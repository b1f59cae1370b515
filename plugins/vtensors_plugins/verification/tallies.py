"""What was found in the bytes of one tensor, chunk by chunk: how often, where first, which value."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors_formats import e4m3
from vtensors_plugins.verification.kinds import Kind

# safetensors dtype -> torch dtype, the integer of its size, all bits but the sign, all bits of the exponent
# (IEEE 754; bfloat16 is the upper half of float32).
_FLOATS: dict[str, tuple[torch.dtype, torch.dtype, int, int]] = {
    "BF16": (torch.bfloat16, torch.int16, 0x7FFF, 0x7F80),
    "F16": (torch.float16, torch.int16, 0x7FFF, 0x7C00),
    "F32": (torch.float32, torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
}


@attrs.define
class Fault:
    """count: elements. first: flat index of the first. value: of the first."""

    count: int
    first: int
    value: float


@attrs.define
class Tally:
    """faults: code of a finding -> what was found. nonzero: a value that is not zero was seen.

    low, high: the smallest and the largest finite value of a scale.
    """

    faults: dict[str, Fault] = attrs.field(factory=dict)
    nonzero: bool = False
    low: float = float("inf")
    high: float = 0.0

    def merge(self, other: Tally) -> None:
        """Take in what another chunk of the same tensor gave."""
        self.nonzero = self.nonzero or other.nonzero
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        for code, fault in other.faults.items():
            mine = self.faults.get(code)
            if mine is None:
                self.faults[code] = fault
            else:
                first, value = min((mine.first, mine.value), (fault.first, fault.value), key=lambda p: p[0])
                self.faults[code] = Fault(count=mine.count + fault.count, first=first, value=value)


def tally_chunk(kind: Kind, dtype: str, data: Tensor, offset: int, *, look_for_nonzero: bool) -> Tally:
    """The tally of one chunk.

    data: uint8, whole elements of the safetensors dtype. offset: flat index of its first element.
    look_for_nonzero: whether a value other than zero is still to be found.
    """
    tally = Tally()
    if data.numel() == 0:
        return tally
    if kind is Kind.E4M3_CODES:
        _e4m3_codes(tally, data, offset)
    elif kind is Kind.E4M3_SCALE:
        _e4m3_scale(tally, data, offset)
    elif kind is Kind.E8M0_SCALE:
        if int(data.max()) == 0xFF:
            _note(tally, "scale-not-finite", data == 0xFF, offset, data)
        else:
            tally.high = 2.0 ** (int(data.max()) - 127)
    elif kind is Kind.FLOAT_SCALE:
        _float_scale(tally, data.view(_FLOATS[dtype][0]), offset)
    elif kind in (Kind.PLAIN, Kind.PRE_SCALE):
        code = "not-finite" if kind is Kind.PLAIN else "scale-not-finite"
        _finite(tally, data, dtype, code, offset)
    elif kind is Kind.ZERO_POINT:
        values = _any_float(data, dtype)
        if bool((values != 0).any()):
            _note(tally, "zero-point", values != 0, offset, values)
    if look_for_nonzero:
        tally.nonzero = _has_nonzero(kind, dtype, data)
    return tally


def _e4m3_codes(tally: Tally, data: Tensor, offset: int) -> None:
    # NaN is 0x7F and 0xFF: the largest byte taken without, and with, a sign.
    if int(data.max()) == 0xFF or int(data.view(torch.int8).max()) == 0x7F:
        _note(tally, "nan-code", (data & 0x7F) == 0x7F, offset, e4m3.decode(data))


def _e4m3_scale(tally: Tally, data: Tensor, offset: int) -> None:
    low, high = (int(bound) for bound in torch.aminmax(data))
    # Positive and finite E4M3 is 0x01..0x7E.
    if low > 0 and high < 0x7F:
        return
    values = e4m3.decode(data)
    _note(tally, "scale-not-finite", values.isnan(), offset, values)
    _note(tally, "scale-negative", values < 0, offset, values)
    _note(tally, "scale-zero", values == 0, offset, values)


def _float_scale(tally: Tally, data: Tensor, offset: int) -> None:
    values = data.to(torch.float32)
    finite = torch.isfinite(values)
    if bool(finite.any()):
        tally.low, tally.high = (float(bound) for bound in torch.aminmax(values[finite]))
    if bool(finite.all()) and tally.low > 0:
        return
    _note(tally, "scale-not-finite", ~finite, offset, values)
    _note(tally, "scale-negative", finite & (values < 0), offset, values)
    _note(tally, "scale-zero", values == 0, offset, values)


def _finite(tally: Tally, data: Tensor, dtype: str, code: str, offset: int) -> None:
    floats, integer, magnitude, exponent = _FLOATS[dtype]
    if int((data.view(integer) & magnitude).max()) >= exponent:
        values = data.view(floats)
        _note(tally, code, ~torch.isfinite(values), offset, values)


def _any_float(data: Tensor, dtype: str) -> Tensor:
    if dtype in _FLOATS:
        return data.view(_FLOATS[dtype][0]).to(torch.float32)
    if dtype == "F8_E4M3":
        return e4m3.decode(data)
    integers = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
    return data.view(integers.get(dtype, torch.uint8)).to(torch.float32)


def _has_nonzero(kind: Kind, dtype: str, data: Tensor) -> bool:
    if kind is Kind.E2M1_CODES:
        return bool((data & 0x77).any())
    if kind is Kind.E4M3_CODES:
        return bool((data & 0x7F).any())
    if dtype in _FLOATS:
        return bool(data.view(_FLOATS[dtype][0]).any())
    return True


def _note(tally: Tally, code: str, mask: Tensor, offset: int, values: Tensor) -> None:
    count = int(mask.sum())
    if count:
        first = int(mask.view(torch.uint8).argmax())
        tally.faults[code] = Fault(count=count, first=offset + first, value=float(values[first]))
