"""How far two tensors are apart, added up window by window."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from vtensors_plugins.verification.reach import snr_db

BLOCK = 128
_KEPT = 3


@attrs.frozen(kw_only=True)
class Block:
    """rows, columns: [first, end) of a block of at most 128 x 128. snr_db: of that block alone."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    snr_db: float

    def shown(self) -> str:
        """The block as messages name it."""
        rows, columns = (f"{first}..{end}" for first, end in (self.rows, self.columns))
        return f"rows {rows} columns {columns}: {self.snr_db:.1f} dB"


@attrs.define
class Differences:
    """Sums over what was added. columns: K of a matrix, 0 for a tensor of another rank: then no blocks."""

    columns: int
    max_abs: float = 0.0
    worst: list[Block] = attrs.field(factory=list)
    _dot: float = 0.0
    _ours: float = 0.0
    _theirs: float = 0.0
    _noise: float = 0.0

    @property
    def cosine(self) -> float:
        """Of the two tensors as vectors; 1 for two of zeros, 0 for one."""
        if self._ours == 0 or self._theirs == 0:
            return float(self._ours == self._theirs)
        return self._dot / math.sqrt(self._ours * self._theirs)

    @property
    def snr_db(self) -> float | None:
        """10 log10(sum of squares of the reference / sum of squared differences); None where nothing differs."""
        return snr_db(self._theirs, self._noise)

    def add(self, start: int, ours: Tensor, theirs: Tensor) -> None:
        """ours, theirs: float32 of one shape, rows start.. of the tensor."""
        if ours.numel() == 0:
            return
        theirs_squared = theirs.square()
        signal = float(theirs_squared.sum(dtype=torch.float64))
        self._theirs += signal
        if torch.equal(ours, theirs):
            self._ours += signal
            self._dot += signal
            return
        error = ours - theirs
        squared = error.square()
        self._ours += float(ours.square().sum(dtype=torch.float64))
        self._dot += float((ours * theirs).sum(dtype=torch.float64))
        self._noise += float(squared.sum(dtype=torch.float64))
        self.max_abs = max(self.max_abs, float(error.abs().max()))
        if self.columns and ours.ndim == 2:
            self._add_blocks(start, squared, theirs_squared)

    def _add_blocks(self, start: int, squared: Tensor, signal: Tensor) -> None:
        noise, power = _block_sums(squared), _block_sums(signal)
        # A block of zeros has no ratio: its noise is measured against the smallest number instead.
        ratio = noise / power.clamp(min=torch.finfo(torch.float32).tiny)
        largest = ratio.flatten().topk(min(_KEPT, ratio.numel()))
        for value, place in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
            row, column = divmod(place, ratio.shape[1])
            rows = (start + row * BLOCK, min(start + (row + 1) * BLOCK, start + squared.shape[0]))
            columns = (column * BLOCK, min((column + 1) * BLOCK, squared.shape[1]))
            if value > 0:
                self.worst.append(Block(rows=rows, columns=columns, snr_db=-10 * math.log10(value)))
        self.worst.sort(key=lambda block: block.snr_db)
        del self.worst[_KEPT:]


def _block_sums(values: Tensor) -> Tensor:
    n, k = values.shape
    padded = torch.nn.functional.pad(values, (0, -k % BLOCK, 0, -n % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK).sum((1, 3))
