"""One unit into its file: stored bytes copied or changed, values made anew some rows at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from math import lcm, prod
from typing import TYPE_CHECKING

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.conversion.layout import PlannedTensor
from vtensors.conversion.parts import DEFAULT_BLOCK, one_expert, row_window
from vtensors.conversion.reading import PartSource, part_chunks, read_part
from vtensors.conversion.units import Remake, Unit
from vtensors.counts import counted
from vtensors.errors import PluginError, WeightValueError
from vtensors.reading import TensorReader
from vtensors.records import Claim

if TYPE_CHECKING:
    from torch import Tensor

# float32 bytes of the rows that are in memory at a time; the encoders need a few times that.
WINDOW_BYTES = 16 << 20
_CHUNK = 8 << 20
_WEIGHT_ROLES = {"global_divisor": "global_scale", "input_divisor": "input_scale"}
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

Progress = Callable[[int], None]


@attrs.define
class UnitWriter:
    """Writes units into open files; remembers the largest magnitude of matrices that share it."""

    checkpoint: Checkpoint
    reader: TensorReader
    _amax: dict[str, Tensor] = attrs.field(factory=dict, init=False)

    def write(self, unit: Unit, descriptor: int, offsets: Mapping[str, int], progress: Progress) -> None:
        """Write every tensor of the unit at its offset. progress: called with the bytes written.

        Raises CheckpointError, WeightValueError (naming the tensor) and OSError.
        """
        for tensor in unit.tensors:
            if tensor.role in unit.parts:
                self._copy(unit, tensor, descriptor, offsets[tensor.name], progress)
        if unit.remake is not None:
            made = [tensor for tensor in unit.tensors if tensor.role not in unit.parts]
            self._make(unit.name, unit.remake, made, descriptor, offsets, progress)

    def _copy(
        self, unit: Unit, tensor: PlannedTensor, descriptor: int, offset: int, progress: Progress
    ) -> None:
        part = unit.parts[tensor.role]
        if tensor.change is None and not part.transposed:
            for chunk in part_chunks(self.reader, part):
                write_at(descriptor, chunk, offset)
                offset += len(chunk)
                progress(len(chunk))
            return
        data: bytes | bytearray = read_part(self.reader, part)
        if tensor.change is not None:
            data = changed(tensor, bytes(data), part.info.name)
        write_at(descriptor, data, offset)
        progress(len(data))

    def _make(
        self,
        module: str,
        remake: Remake,
        tensors: list[PlannedTensor],
        descriptor: int,
        offsets: Mapping[str, int],
        progress: Progress,
    ) -> None:
        amax = self._shared_amax(module, remake) if remake.encoder and remake.encoder.needs_amax else None
        collected: dict[str, list[bytes]] = {}
        place = {tensor.name: offsets[tensor.name] for tensor in tensors}
        for rows in self._windows(remake.claim, remake):
            for role, values in _encoded(rows, amax, remake).items():
                for tensor in tensors:
                    if tensor.role != role:
                        continue
                    data = _bytes(values)
                    if tensor.change is not None or prod(tensor.shape) == 1:
                        pieces = collected.setdefault(tensor.name, [])
                        if values.ndim or not pieces:
                            pieces.append(data)
                        continue
                    write_at(descriptor, data, place[tensor.name])
                    place[tensor.name] += len(data)
                    progress(len(data))
        for tensor in tensors:
            if tensor.name in collected:
                data = b"".join(collected[tensor.name])
                data = changed(tensor, data, tensor.name)
                write_at(descriptor, data, place[tensor.name])
                progress(len(data))
            elif place[tensor.name] != offsets[tensor.name] + tensor.nbytes:
                raise _wrong_size(tensor, place[tensor.name] - offsets[tensor.name])

    def _shared_amax(self, module: str, remake: Remake) -> Tensor:
        """[] float32: the largest magnitude of the module and its partners."""
        import torch

        found = []
        for name in remake.partners or (module,):
            if name not in self._amax:
                claim = remake.claim if name == module else self.checkpoint.modules[name].claim
                blocks = [rows.abs().max().to(torch.float32) for rows in self._windows(claim, remake)]
                self._amax[name] = torch.stack(blocks).max()
            found.append(self._amax[name])
        return torch.stack(found).max()

    def _windows(self, claim: Claim, remake: Remake) -> Iterator[Tensor]:
        """The values of a module [n, K], some rows at a time: 16-bit as stored, else float32."""
        import torch

        claim, parts = one_expert(claim)
        n = claim.shape[0] if claim.shape else 1
        step = n
        if len(claim.shape) == 2 and claim.part is None:
            block = claim.declared.block if claim.declared and claim.declared.block else DEFAULT_BLOCK
            unit = lcm(remake.encoder.row_step if remake.encoder else 1, block[0])
            step = max(1, WINDOW_BYTES // (4 * max(1, claim.shape[1])) // unit) * unit
        own = {"bf16": torch.bfloat16, "f16": torch.float16}.get(claim.scheme, torch.float32)
        for start in range(0, n, step):
            stop = min(start + step, n)
            window = row_window(claim, parts, start, stop) if step < n else parts
            cut = attrs.evolve(claim, shape=(stop - start, *claim.shape[1:]))
            weight = remake.convention.read(cut, PartSource(self.reader, window))
            weight.check_values({_WEIGHT_ROLES.get(r, r): i.name for r, i in claim.roles.items()})
            values = weight.dequantize(own)
            if remake.fold:
                values = values * weight.pre_scale.to(values.dtype)  # type: ignore[attr-defined]
            yield values


def changed(tensor: PlannedTensor, data: bytes, source: str) -> bytes:
    """The data after the tensor's change, of its planned size. source: named by WeightValueError."""
    if tensor.change is not None:
        try:
            data = tensor.change(data)
        except WeightValueError as problem:
            raise WeightValueError(
                problem.problem,
                tensor=source,
                seen=problem.seen,
                accepted=problem.accepted,
                fix=problem.fix,
            ) from problem
    if len(data) != tensor.nbytes:
        raise _wrong_size(tensor, len(data))
    return data


def write_at(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of the bytes at a place in a file. Raises OSError."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + _CHUNK], offset + done)


def _encoded(rows: Tensor, amax: Tensor | None, remake: Remake) -> Mapping[str, Tensor]:
    import torch

    if remake.encoder is None:
        return {"codes": rows.to(getattr(torch, _DTYPES[remake.dtype]))}
    return remake.encoder.encode(rows, amax, remake.options)


def _bytes(values: Tensor) -> bytes:
    import torch

    raw: bytes = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _wrong_size(tensor: PlannedTensor, size: int) -> PluginError:
    return PluginError(
        "a writer or encoder gave another number of bytes than it announced",
        tensor=tensor.name,
        seen=counted(size, "byte"),
        accepted=f"{counted(tensor.nbytes, 'byte')} for {tensor.dtype} {list(tensor.shape)}",
        fix="repair or upgrade that plugin",
    )
