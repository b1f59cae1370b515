"""Steps of one engine that several calls share: whoever takes one tells the others what it gave them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf

from vtensors_engine.engine import Engine, Event
from vtensors_engine.outputs import Timing
from vtensors_engine.sequence import Sequence


class SharedSteps:
    """The events of each call's own sequences. Calls of several threads take turns, a step at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # What is still to be told of each sequence that somebody reads; all of one call have the same list.
        self._untold: dict[Sequence, list[Event]] = {}
        # Held for a step and for what it tells.
        self._turn = threading.Lock()

    def events(self, sequences: SequenceOf[Sequence], timing: Timing | None) -> Generator[Event]:
        """The events of these sequences until all have ended. Closed early, it cancels them.

        timing: of the steps that this call takes. Raises DeviceError where one of these fails.
        """
        untold: list[Event] = []
        self._untold.update(dict.fromkeys(sequences, untold))
        try:
            for sequence in sequences:
                self._engine.add(sequence)
            running = deque(sequences)
            while told := self._next(running, untold, timing):
                yield from told
        finally:
            # A reader has left, or a step has failed: nothing stays behind in the engine. Nothing here waits, because
            # a generator that nobody has closed ends in whatever thread collects it, in the midst of a step perhaps.
            for sequence in sequences:
                self._untold.pop(sequence, None)
                self._engine.cancel(sequence)

    def _next(self, running: deque[Sequence], untold: list[Event], timing: Timing | None) -> list[Event]:
        """Steps until something is untold; [] where all have ended and all is told. running: those that have not."""
        while True:
            with self._turn:
                if untold:
                    told = untold.copy()
                    untold.clear()
                    return told
                while running and running[0].finish_reason is not None:
                    running.popleft()
                if not running:
                    return []
                self._step(timing)

    def _step(self, timing: Timing | None) -> None:
        events: list[Event] = []
        try:
            self._engine.step(timing, events)
        finally:
            # A step that fails may have come to the end of others' sequences before.
            for event in events:
                untold = self._untold.get(event.sequence)
                if untold is not None:
                    untold.append(event)
