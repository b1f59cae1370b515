"""What stored bytes go through on their way: reciprocals, widening, and checks. Torch-free, little-endian."""

from __future__ import annotations

import math
import struct

from vtensors.errors import WeightValueError


def reciprocal_float32(data: bytes) -> bytes:
    """1 / x of each F32 value, rounded once; a multiplier becomes a divisor and the reverse.

    Raises WeightValueError for a value that is not finite and positive, or whose reciprocal is not: an infinite
    divisor must not become a multiplier of zero.
    """
    out = bytearray()
    for (value,) in struct.iter_unpack("<f", data):
        # The quotient in double precision rounds to the float32 quotient: 53 bits are twice 24 and more.
        inverse = 1.0 / value if math.isfinite(value) and value > 0 else math.nan
        try:
            packed = struct.pack("<f", inverse)
        except OverflowError:
            packed = struct.pack("<f", math.inf)
        (stored,) = struct.unpack("<f", packed)
        if not (math.isfinite(stored) and stored > 0):
            raise WeightValueError(
                "a global scale has no reciprocal",
                seen=repr(value),
                accepted="a finite value above zero",
                fix="the writer failed on this module (an expert that saw no data, say): quantize it again",
            )
        out += packed
    return bytes(out)


def ulps_after_two_reciprocals(data: bytes) -> int:
    """Largest distance, in units of the last place, of 1 / (1 / x) from x over F32 values > 0."""
    there = reciprocal_float32(data)
    back = reciprocal_float32(there)
    pairs = zip(struct.iter_unpack("<i", data), struct.iter_unpack("<i", back), strict=True)
    return max((abs(before - after) for (before,), (after,) in pairs), default=0)


def bfloat16_to_float32(data: bytes) -> bytes:
    """The same values, exactly."""
    out = bytearray(2 * len(data))
    out[2::4], out[3::4] = data[0::2], data[1::2]
    return bytes(out)


def float16_to_float32(data: bytes) -> bytes:
    """The same values, exactly."""
    values = [value for (value,) in struct.iter_unpack("<e", data)]
    return struct.pack(f"<{len(values)}f", *values)


def exponents_to_float32(data: bytes) -> bytes:
    """2^(b - 127) of each E8M0 byte, exactly. Raises WeightValueError for 0xFF, which is NaN."""
    if 0xFF in data:
        raise WeightValueError(
            "an E8M0 scale is NaN", seen=f"byte 0xFF at {data.index(0xFF)}", accepted="bytes 0x00 to 0xFE"
        )
    # The byte is float32's exponent field; 2^-127 lies below its normal range.
    return struct.pack(f"<{len(data)}I", *(byte << 23 if byte else 1 << 22 for byte in data))


def is_all_zero(data: bytes, dtype: str) -> bool:
    """Whether every element is zero; -0.0 is. dtype: safetensors name of an integer or float dtype."""
    if dtype.startswith(("I", "U", "BOOL")):
        return not any(data)
    width = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(dtype, 1)
    return not any(data[place] & (0x7F if place % width == width - 1 else 0xFF) for place in range(len(data)))


WIDEN = {"BF16": bfloat16_to_float32, "F16": float16_to_float32, "F32": None}
