"""Runners: a prompt in, then one token per running sequence and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from vtensors.counts import counted
from vtensors.errors import RequestError, VtensorsError
from vtensors.records import Selected
from vtensors_engine.drawing import Draw
from vtensors_engine.sampling import largest_token


class NoRoomError(RequestError):
    """The device has not enough free memory for what a runner keeps; it could serve the model with less."""


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


@attrs.frozen(slots=True)
class Row:
    """A sequence that takes one token further.

    token: what it is appended; None is the token that the runner itself chose last for it.
    draw: how it chooses the token behind; None is the largest logit.
    """

    handle: int
    token: int | None
    draw: Draw | None = None


class Step(Protocol):
    """What came of a launch, in the order of its rows. It is read once, after the steps launched before it."""

    def tokens(self) -> list[int]:
        """The token drawn for each row, or the index of its largest logit, the lowest of equal ones; waits.

        Of a failed row anything.
        """

    def failures(self) -> Mapping[int, VtensorsError]:
        """Row -> why it has no token, such as `not_finite`; waits."""

    def logits(self) -> torch.Tensor:
        """[B, V] in the model's dtype, on its device; valid until the next `prefill` or `decode`."""


class Runner(Protocol):
    """Keeps the states of running sequences; a handle stands for one of them.

    capacity: how many sequences may be running at once, None where nothing bounds it; `admit` decides.
    ahead: how many steps may have been launched and not read when the next one is launched.
    draws: whether it draws tokens itself; otherwise it must not be given a draw.

    VtensorsError (or torch.OutOfMemoryError) of `admit` and `prefill` concerns that sequence alone. Whatever
    else is raised, here or by a `Step`, is the device's failure.
    """

    @property
    def capacity(self) -> int | None: ...
    @property
    def ahead(self) -> int: ...
    @property
    def draws(self) -> bool: ...

    def admit(self, prompt: Sequence[int], limit: int) -> int | None:
        """Reserve what a prompt and limit tokens behind it need, and return the handle.

        None where there is no room now. Raises RequestError for what can never fit.
        """

    def prefill(self, handle: int, draw: Draw | None = None) -> Step | None:
        """Process a chunk of the prompt: None while more remain, behind the last a step of one row.

        draw: how the token behind the last chunk is chosen, as in a `Row`.
        """

    def decode(self, rows: Sequence[Row]) -> Step:
        """Append one token to each sequence, all that are admitted, prefilled and not released.

        A row's result is the same whatever its neighbours are.
        """

    def release(self, handle: int) -> None:
        """Forget a sequence, also in the midst of its prompt and before steps of it have been read."""


@attrs.frozen(kw_only=True, eq=False)
class ReferenceStep:
    """A step whose results are there. rows: [V] each, or why there is none. See `Step`."""

    _rows: tuple[torch.Tensor | VtensorsError, ...]
    _tokens: list[int] = attrs.field(factory=list, init=False)
    _failures: dict[int, VtensorsError] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        for index, row in enumerate(self._rows):
            try:
                if isinstance(row, VtensorsError):
                    raise row
                self._tokens.append(largest_token(row))
            except VtensorsError as cause:
                self._failures[index] = cause
                self._tokens.append(0)

    def tokens(self) -> list[int]:
        """See `Step`."""
        return list(self._tokens)

    def failures(self) -> Mapping[int, VtensorsError]:
        """See `Step`."""
        return self._failures

    def logits(self) -> torch.Tensor:
        """See `Step`; a failed row repeats another."""
        rows = [row for row in self._rows if isinstance(row, torch.Tensor)]
        return torch.stack([row if isinstance(row, torch.Tensor) else rows[0] for row in self._rows])


@attrs.define(kw_only=True, eq=False)
class _Running:
    """One sequence. chosen: the runner's own choice behind the last step, None before the first."""

    prompt: tuple[int, ...]
    state: Any
    chosen: int | None = None


class ReferenceRunner:
    """Runs any `SteppedModel` on its own device, one sequence after the other.

    A prompt is processed in one chunk. Rows never meet in a matrix product, so a sequence has bitwise the
    same logits alone and in company.
    """

    ahead = 0
    draws = False

    def __init__(self, model: SteppedModel, *, max_sequences: int | None = None) -> None:
        self._model = model
        self._capacity = max_sequences
        self._sequences: dict[int, _Running] = {}
        self._next_handle = 0

    @property
    def capacity(self) -> int | None:
        """max_sequences; where that is None memory is the only bound."""
        return self._capacity

    def admit(self, prompt: Sequence[int], limit: int) -> int | None:
        """See `Runner`."""
        if not prompt or limit < 1:
            raise RequestError(
                "a runner needs a prompt, and a token to make",
                seen=f"{len(prompt):,} and {counted(limit, 'token')}",
                accepted="at least one token each",
            )
        if len(prompt) + limit > self._model.max_positions:
            raise RequestError(
                "prompt and completion can never fit",
                seen=f"{len(prompt):,} and {counted(limit, 'token')}",
                accepted=f"{counted(self._model.max_positions, 'token')} together",
            )
        if self._capacity is not None and len(self._sequences) >= self._capacity:
            return None
        handle = self._next_handle
        self._next_handle += 1
        self._sequences[handle] = _Running(prompt=tuple(prompt), state=self._model.new_state())
        return handle

    def prefill(self, handle: int, draw: Draw | None = None) -> ReferenceStep:
        """See `Runner`."""
        _require_greedy(draw)
        own = self._sequence(handle)
        return self._step([own], [self._append(own.prompt, own.state)])

    def decode(self, rows: Sequence[Row]) -> ReferenceStep:
        """See `Runner`."""
        for row in rows:
            _require_greedy(row.draw)
        sequences = [self._sequence(row.handle) for row in rows]
        results: list[torch.Tensor | VtensorsError] = []
        for row, own in zip(rows, sequences, strict=True):
            token = own.chosen if row.token is None else row.token
            if token is None:
                raise VtensorsError("the prompt has not been processed", seen=f"handle {row.handle}")
            try:
                results.append(self._append((token,), own.state))
            except VtensorsError as cause:
                results.append(cause)
        return self._step(sequences, results)

    def release(self, handle: int) -> None:
        """See `Runner`."""
        self._sequence(handle)
        del self._sequences[handle]

    def _append(self, tokens: Sequence[int], state: Any) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor(list(tokens), dtype=torch.int64, device=self._model.device)
            return self._model.step(ids, state)

    def _step(
        self, sequences: Sequence[_Running], results: Sequence[torch.Tensor | VtensorsError]
    ) -> ReferenceStep:
        step = ReferenceStep(rows=tuple(results))
        for own, token in zip(sequences, step.tokens(), strict=True):
            own.chosen = token
        return step

    def _sequence(self, handle: int) -> _Running:
        if handle not in self._sequences:
            raise VtensorsError("the runner does not know the sequence", seen=f"handle {handle}")
        return self._sequences[handle]


def _require_greedy(draw: Draw | None) -> None:
    if draw is not None:
        raise VtensorsError("the reference runner draws no tokens", seen=str(draw), accepted="no draw")
