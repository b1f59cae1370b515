"""What a model remembers of one sequence: keys and values per attention layer, states per delta net layer."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

_FIRST_CAPACITY = 64


@attrs.define
class KeyValueCache:
    """Keys and values of one layer, [KV, length, D] in the model's dtype; the buffers grow by doubling."""

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> KeyValueCache:
        """A cache without tokens."""
        shape = (kv_heads, 0, head_dim)
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values [T, KV, D]; returns all of them, two views [KV, length, D]."""
        end = self.length + keys.shape[0]
        if end > self.keys.shape[1]:
            capacity = max(end, 2 * self.keys.shape[1], _FIRST_CAPACITY)
            self.keys, self.values = (self._grown(old, capacity) for old in (self.keys, self.values))
        self.keys[:, self.length : end] = keys.transpose(0, 1)
        self.values[:, self.length : end] = values.transpose(0, 1)
        self.length = end
        return self.keys[:, :end], self.values[:, :end]

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        grown = old.new_empty(old.shape[0], capacity, old.shape[2])
        grown[:, : self.length] = old[:, : self.length]
        return grown


@attrs.define
class DeltaNetState:
    """State of one delta net layer.

    history: [W - 1, C] in the model's dtype, the last raw inputs of the convolution, oldest first.
    memory: [HV, DK, DV] float32.
    """

    history: Tensor
    memory: Tensor


@attrs.define
class SequenceState:
    """Everything a model remembers of one sequence. length: tokens seen; layers: one entry per layer."""

    layers: tuple[KeyValueCache | DeltaNetState, ...]
    length: int = 0
