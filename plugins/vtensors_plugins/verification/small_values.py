"""The values of small float tensors, such as global scales, in plain Python."""

from __future__ import annotations

import math
import struct

import attrs

from vtensors.modules import Module
from vtensors.tensors import TensorInfo
from vtensors.verification.shard_bytes import ShardBytes

# Scales per expert of a stacked tensor are the longest.
_MOST = 1 << 16


@attrs.define
class SmallValues:
    """Reads each tensor once. source: the checkpoint's files."""

    source: ShardBytes
    _known: dict[str, tuple[float, ...]] = attrs.field(factory=dict, init=False)

    def of(self, info: TensorInfo) -> tuple[float, ...]:
        """The values in order; empty for a tensor that is no float, is long, or lies behind the file's end."""
        if info.name not in self._known:
            self._known[info.name] = self._read(info)
        return self._known[info.name]

    def scalar(self, module: Module, role: str) -> float | None:
        """The one value of a module's role (its expert's, where stacked); None where there is none."""
        info = module.claim.roles.get(role)
        values = self.of(info) if info is not None else ()
        if len(values) == 1:
            return values[0]
        part = module.claim.part
        if info is not None and part is not None and len(values) == info.shape[0] == math.prod(info.shape):
            return values[part.expert]
        return None

    def weight_multiplier(self, module: Module) -> float | None:
        """The scalar that multiplies a whole weight, whatever its sense on disk; None if it has none."""
        divisor = self.scalar(module, "global_divisor")
        if divisor is not None:
            return _inverse(divisor)
        role = (
            "global_scale" if module.scheme == "nvfp4" else "scale" if module.scheme == "fp8-tensor" else ""
        )
        return self.scalar(module, role)

    def input_multiplier(self, module: Module) -> float | None:
        """The scale that multiplies a module's quantized input, whatever its sense on disk."""
        divisor = self.scalar(module, "input_divisor")
        return _inverse(divisor) if divisor is not None else self.scalar(module, "input_scale")

    def _read(self, info: TensorInfo) -> tuple[float, ...]:
        count = math.prod(info.shape)
        if count > _MOST or info.end > self.source.snapshot.shards[info.file].file_size:
            return ()
        if info.dtype not in ("F32", "F16", "BF16"):
            return ()
        data = bytes(self.source.read(info.file, info.begin, info.end))
        if info.dtype == "BF16":
            # bfloat16 is the upper half of float32.
            words = struct.unpack(f"<{count}H", data)
            return struct.unpack(
                f"<{count}f", b"".join(b"\0\0" + word.to_bytes(2, "little") for word in words)
            )
        return struct.unpack(f"<{count}{'f' if info.dtype == 'F32' else 'e'}", data)


def is_usable(value: float | None) -> bool:
    """Whether a scale is there, finite and above zero."""
    return value is not None and math.isfinite(value) and value > 0


def _inverse(value: float) -> float:
    return 1.0 / value if value else math.inf
