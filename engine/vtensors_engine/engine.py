"""`Engine`: many sequences over one runner. The step loop is `Engine.step`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import attrs
import torch

from vtensors.errors import DeviceError, VtensorsError
from vtensors_engine.drawing import Draw
from vtensors_engine.outputs import StreamPiece, Timing
from vtensors_engine.runner import Row, Runner, Step
from vtensors_engine.sampling import SampledToken, sample_rows
from vtensors_engine.sequence import Sequence

_SAMPLERS = min(8, os.cpu_count() or 1)


@attrs.frozen(kw_only=True, slots=True)
class Event:
    """What happened to a sequence. The piece that ends it has a finish_reason."""

    sequence: Sequence
    piece: StreamPiece


@attrs.frozen(kw_only=True, slots=True, eq=False)
class _Flight:
    """A launched step that has not been read. sequences: of its rows. prompt: whether prefill gave it."""

    step: Step
    sequences: tuple[Sequence, ...]
    prompt: bool


class Engine:
    """Takes sequences at any time and gives each its tokens; no result depends on the company.

    They are admitted in the order they came: one that does not fit yet waits, and none overtakes it. While
    the runner itself chooses the tokens of every running sequence, `runner.ahead` steps are launched before the
    oldest is read: its end is seen late then, and what was computed beyond it is dropped.

    `add` and `cancel` may be called at any time, from any thread; one thread at a time takes a step.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        # Of the token behind the prompt.
        self._first_draw: Draw | None = None
        # Those with launches to come; the last one of a sequence takes it out.
        self._running: list[Sequence] = []
        self._flights: deque[_Flight] = deque()
        # Held while anything of the above changes; those that have been cancelled meanwhile.
        self._turn = threading.Lock()
        self._leaving: deque[Sequence] = deque()
        # Threads are started when rows of a large vocabulary are sampled, not before.
        self._pool = ThreadPoolExecutor(max_workers=_SAMPLERS, thread_name_prefix="sampling")

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._prefilling or self._running or self._flights)

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence; it is admitted in a later `step`."""
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence with `abort`, without an event; nothing happens to one that has ended.

        In the midst of a step, where a reader leaves in another thread or is collected, it ends behind that step.
        """
        self._leaving.append(sequence)
        self._end_leaving()

    def step(self, timing: Timing | None = None, events: list[Event] | None = None) -> list[Event]:
        """One token of each running sequence, one chunk of a prompt, and the events of what could be read.

        timing: added to. events: added to and returned; what a step that fails has come to is there too.
        A failure of one request is an event of it. Raises DeviceError where the device fails: then everything has
        ended with that error, without events, and nothing stays behind in the runner.
        """
        events, timing = [] if events is None else events, timing or Timing()
        try:
            with self._turn:
                self._step(events, timing)
        finally:
            self._end_leaving()
        return events

    def _step(self, events: list[Event], timing: Timing) -> None:
        try:
            decoding = bool(self._running)
            if decoding:
                self._decode(events, timing)
            self._admit(events)
            self._prefill(events, timing)
            if self._flights and not decoding:
                self._read(events, timing)
        except BaseException as cause:
            failure = self._end_all(cause)
            if isinstance(cause, Exception):
                raise failure from cause
            raise

    def _end_leaving(self) -> None:
        """Whoever holds the turn does this behind it. Never waits: the step may wait for the thread that leaves."""
        while self._leaving and self._turn.acquire(blocking=False):
            try:
                while self._leaving:
                    sequence = self._leaving.popleft()
                    if sequence.finish_reason is None:
                        sequence.abort()
                        self._forget(sequence)
            finally:
                self._turn.release()

    def _admit(self, events: list[Event]) -> None:
        """The next sequence that waits gets its handle, unless the prompt of another is still being processed."""
        while self._waiting and self._prefilling is None:
            sequence = self._waiting[0]
            try:
                sequence.handle = self.runner.admit(sequence.prompt_token_ids, sequence.limit)
                if sequence.handle is None:
                    if self._running or self._flights:
                        return
                    raise VtensorsError("the runner has no room for a request although nothing runs")
            except (VtensorsError, torch.OutOfMemoryError) as cause:
                self._fail(sequence, cause, events)
                continue
            # In this order, as everywhere: an interrupt between two lines must find it in one place at least.
            self._prefilling = sequence
            self._waiting.popleft()
            self._first_draw = self._draw(sequence)

    def _prefill(self, events: list[Event], timing: Timing) -> None:
        sequence = self._prefilling
        if sequence is None or sequence.handle is None:
            return
        started = time.perf_counter()
        try:
            step = self.runner.prefill(sequence.handle, self._first_draw)
        except (VtensorsError, torch.OutOfMemoryError) as cause:
            self._fail(sequence, cause, events)
            return
        timing.prefill_seconds += time.perf_counter() - started
        if step is not None:
            self._running.append(sequence)
            self._prefilling = None
            self._launched(_Flight(step=step, sequences=(sequence,), prompt=True), events, timing)

    def _decode(self, events: list[Event], timing: Timing) -> None:
        started = time.perf_counter()
        running = tuple(self._running)
        step = self.runner.decode([self._row(sequence) for sequence in running])
        timing.decode_seconds += time.perf_counter() - started
        self._launched(_Flight(step=step, sequences=running, prompt=False), events, timing)

    def _launched(self, flight: _Flight, events: list[Event], timing: Timing) -> None:
        """Count the tokens to come, and read until no more steps are unread than may be."""
        ahead = 0 if any(self._on_host(sequence) for sequence in self._running) else self.runner.ahead
        self._flights.append(flight)
        for sequence in flight.sequences:
            sequence.launched += 1
            if sequence.launched == sequence.limit:
                self._forget(sequence)
        while len(self._flights) > ahead:
            self._read(events, timing)

    def _read(self, events: list[Event], timing: Timing) -> None:
        """The tokens of the oldest launch; those of a sequence that has ended since are dropped."""
        started = time.perf_counter()
        flight = self._flights[0]
        tokens, failures = flight.step.tokens(), flight.step.failures()
        wanted = [(row, s) for row, s in enumerate(flight.sequences) if s.finish_reason is None]
        on_host = [
            (row, sequence.params, sequence.generator)
            for row, sequence in wanted
            if self._on_host(sequence) and row not in failures
        ]
        found: dict[int, SampledToken | VtensorsError] = dict(failures)
        if on_host:
            sampled = sample_rows(flight.step.logits(), on_host, self._pool)
            found |= {row: token for (row, _, _), token in zip(on_host, sampled, strict=True)}
        for row, sequence in wanted:
            token = found.get(row) or SampledToken(token_id=tokens[row])
            if isinstance(token, VtensorsError):
                self._fail(sequence, token, events)
                continue
            events.append(Event(sequence=sequence, piece=sequence.append(token)))
            if sequence.finish_reason is not None:
                self._forget(sequence)
            if flight.prompt:
                timing.prefill_tokens += len(sequence.prompt_token_ids)
            else:
                timing.decode_tokens += 1
        # Not before: `_end_all` must find what could not be read.
        self._flights.popleft()
        seconds = time.perf_counter() - started
        if flight.prompt:
            timing.prefill_seconds += seconds
        else:
            timing.decode_seconds += seconds

    def _on_host(self, sequence: Sequence) -> bool:
        """Whether its tokens are chosen here, from the logits."""
        return sequence.reported or (sequence.drawn and not self.runner.draws)

    def _draw(self, sequence: Sequence) -> Draw | None:
        return sequence.next_draw() if sequence.drawn and not self._on_host(sequence) else None

    def _row(self, sequence: Sequence) -> Row:
        if sequence.handle is None:
            raise VtensorsError(
                "a sequence without a handle cannot be launched", seen=f"prompt {sequence.index}"
            )
        token = sequence.last_token if self._on_host(sequence) else None
        return Row(sequence.handle, token, self._draw(sequence))

    def _fail(self, sequence: Sequence, cause: Exception, events: list[Event]) -> None:
        failure = cause if isinstance(cause, VtensorsError) else _out_of_memory(cause)
        piece = sequence.fail(failure)
        self._forget(sequence)
        events.append(Event(sequence=sequence, piece=piece))

    def _forget(self, sequence: Sequence) -> None:
        """Nothing more is launched for it; what it holds of the runner is free."""
        if sequence.handle is not None:
            self.runner.release(sequence.handle)
            sequence.handle = None
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence in self._running:
            self._running.remove(sequence)
        elif not sequence.launched and sequence in self._waiting:
            self._waiting.remove(sequence)

    def _end_all(self, cause: BaseException) -> VtensorsError:
        """End everything where the device or the process that waits for it cannot go on."""
        failed = isinstance(cause, Exception)
        failure = DeviceError(
            f"{'the device failed' if failed else 'a step was interrupted'}, and every request that was in work has "
            "ended",
            seen=f"{type(cause).__name__}: {cause}",
            fix="where memory is short, pass a smaller max_sequences" if failed else "send them again",
        )
        unread = [sequence for flight in self._flights for sequence in flight.sequences]
        prefilling = [] if self._prefilling is None else [self._prefilling]
        everything = dict.fromkeys((*self._waiting, *prefilling, *self._running, *unread))
        self._flights.clear()
        self._running.clear()
        self._prefilling = None
        for sequence in everything:
            # A device that has failed may fail again; the others shall be released all the same.
            with contextlib.suppress(Exception):
                self._forget(sequence)
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            if sequence.finish_reason is None:
                sequence.fail(failure)
        return failure


def _out_of_memory(cause: Exception) -> VtensorsError:
    return VtensorsError(
        "the device has not enough memory for the request",
        seen=str(cause),
        fix="shorten it, or pass a smaller max_sequences",
    )
