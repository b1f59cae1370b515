"""Runners: a prompt in, then one token per running sequence and step; logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vtensors.errors import VtensorsError
from vtensors.records import Selected


class SteppedModel(Protocol):
    """A model that keeps the state of a sequence between calls.

    dtype: of its logits. max_positions: most tokens of one sequence. selected: the kernel of every module.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def selected(self) -> tuple[Selected, ...]: ...

    def new_state(self) -> Any:
        """The state of an empty sequence."""

    def step(self, token_ids: torch.Tensor, state: Any) -> torch.Tensor:
        """Append token_ids [T] int64 to the sequence of `state`; logits [V] of the last of them."""

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of input_ids [B, T] int64, without state."""


class Runner(Protocol):
    """Keeps the states of running sequences; a handle stands for one of them.

    capacity: how many sequences may be running at once, None where nothing bounds it.
    """

    @property
    def capacity(self) -> int | None: ...

    def start(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Process a prompt of at least one token: its handle, and the logits [V] behind its last token."""

    def step(self, handles: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each sequence: logits [B, V], row b of handles[b].

        A row's result is the same whatever its neighbours are.
        """

    def release(self, handle: int) -> None:
        """Forget a sequence; its handle may be given out again."""


class ReferenceRunner:
    """Runs any `SteppedModel` on its own device, one sequence after the other.

    A prompt is processed in one call. Rows never meet in a matrix product, so a sequence has bitwise the
    same logits alone and in company.
    """

    def __init__(self, model: SteppedModel) -> None:
        self._model = model
        self._states: dict[int, Any] = {}
        self._next_handle = 0

    @property
    def capacity(self) -> int | None:
        """None: memory is the only bound."""
        return None

    def start(self, prompt: Sequence[int]) -> tuple[int, torch.Tensor]:
        """See `Runner.start`."""
        if not prompt:
            raise VtensorsError("a runner cannot start an empty prompt", accepted="at least one token id")
        state = self._model.new_state()
        logits = self._append(prompt, state)
        handle = self._next_handle
        self._next_handle += 1
        self._states[handle] = state
        return handle, logits

    def step(self, handles: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """See `Runner.step`."""
        rows = [
            self._append((token,), self._state(handle)) for handle, token in zip(handles, tokens, strict=True)
        ]
        return torch.stack(rows)

    def release(self, handle: int) -> None:
        """See `Runner.release`."""
        self._state(handle)
        del self._states[handle]

    def _append(self, tokens: Sequence[int], state: Any) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor(list(tokens), dtype=torch.int64, device=self._model.device)
            return self._model.step(ids, state)

    def _state(self, handle: int) -> Any:
        if handle not in self._states:
            raise VtensorsError("the runner does not know the sequence", seen=f"handle {handle}")
        return self._states[handle]
