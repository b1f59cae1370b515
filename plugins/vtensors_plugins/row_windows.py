"""A module's weight a few rows at a time, read without a memory map: memory stays bounded for any tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod
from typing import TYPE_CHECKING

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.modules import Module
from vtensors.reading import TensorReader
from vtensors.records import Claim, Convention, Weight
from vtensors.tensor_source import stored_tensor
from vtensors.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

# Roles whose first dimension runs over output rows or blocks of them. Any other tensor is read whole.
_BY_ROW = ("codes", "block_scale", "scale", "global_scale", "global_divisor", "bias", "weight_zero_point")
WINDOW_ELEMENTS = 4 << 20


@attrs.frozen(kw_only=True)
class RowWindows:
    """Reads one module of a checkpoint in windows of rows.

    reader: of the checkpoint's snapshot. rows: N, the first dimension (1 where there is none).
    align: a window must begin at a multiple of it.
    """

    module: Module
    convention: Convention
    reader: TensorReader
    align: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str, reader: TensorReader) -> RowWindows:
        """The windows of a claimed module."""
        module = checkpoint.modules[name]
        return cls(
            module=module,
            convention=checkpoint.plugins.registry.conventions[module.convention].record,
            reader=reader,
            align=_align(module.claim),
        )

    @property
    def rows(self) -> int:
        """N; 1 for a tensor without dimensions."""
        return self.module.shape[0] if self.module.shape else 1

    def read(self, start: int, stop: int) -> Weight:
        """Rows start..stop as a canonical Weight in memory of its own; start is a multiple of `align`.

        Errors: CheckpointError for a file that changed, and what the convention refuses.
        """
        claim = self.module.claim
        whole = (start, stop) == (0, self.rows)
        source = _Window(claim=claim, reader=self.reader, rows=None if whole else (start, stop))
        if source.one_expert and claim.part is not None:
            claim = attrs.evolve(claim, part=attrs.evolve(claim.part, expert=0))
        return self.convention.read(claim, source)


def common_windows(first: RowWindows, second: RowWindows) -> Iterator[tuple[int, int]]:
    """(start, stop) of windows that cover both modules, which have the same shape.

    A window holds about WINDOW_ELEMENTS; experts of a stacked tensor are read whole.
    """
    rows, align = first.rows, lcm(first.align, second.align)
    if first.module.claim.part is not None or second.module.claim.part is not None or not first.module.shape:
        yield 0, rows
        return
    per_row = max(1, prod(first.module.shape[1:]))
    step = max(align, WINDOW_ELEMENTS // per_row // align * align)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _align(claim: Claim) -> int:
    if claim.scheme != "fp8-block":
        return 1
    return claim.declared.block[0] if claim.declared and claim.declared.block else 128


@attrs.frozen(kw_only=True)
class _Window:
    """A `TensorSource` that reads only the expert, or only the rows, that are wanted."""

    claim: Claim
    reader: TensorReader
    rows: tuple[int, int] | None

    @property
    def one_expert(self) -> bool:
        """Whether every tensor has a slab per expert, of which only the wanted one is read, as the first.

        Not so where only some are stacked, such as the scales of experts with weights of their own.
        """
        codes = self.claim.roles["codes"].shape
        return (
            self.claim.part is not None
            and len(codes) == 3
            and all(
                role == "pre_scale" or info.shape[:1] in ((), codes[:1])
                for role, info in self.claim.roles.items()
            )
        )

    def view(self, info: TensorInfo) -> torch.Tensor:
        first, last = self._range(info)
        if not info.shape:
            return stored_tensor(self.reader.read_copy(info), info, ())
        size = info.nbytes // max(1, info.shape[0])
        data = self.reader.read_part(info, first * size, last * size)
        return stored_tensor(data, info, (last - first, *info.shape[1:]))

    def _range(self, info: TensorInfo) -> tuple[int, int]:
        """The part of the first dimension to read."""
        whole = (0, info.shape[0] if info.shape else 1)
        role = next((role for role, own in self.claim.roles.items() if own is info), "")
        part = self.claim.part
        if part is not None:
            slab = self.one_expert and role != "pre_scale" and info.shape
            return (part.expert, part.expert + 1) if slab else whole
        if self.rows is None or role not in _BY_ROW or not info.shape:
            return whole
        n, align = self.claim.shape[0], _align(self.claim)
        start, stop = self.rows
        if whole[1] == n:
            return start, stop
        if role == "scale" and whole[1] == -(-n // align):
            return start // align, -(-stop // align)
        return whole
