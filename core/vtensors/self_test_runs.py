"""How a self-test runs: what it compiles counts neither against its time nor against its kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import Lock

import attrs

from vtensors.errors import DeviceError
from vtensors.self_test_marks import SelfTestMark

_RUNNING: ContextVar[RunningTest | None] = ContextVar("vtensors_running_test", default=None)


@attrs.define(kw_only=True)
class RunningTest:
    """A self-test that goes on. mark: of its kernel, where one is kept. preparing: whether it compiles just now.

    It may compile in threads of its own, and be part of another test, which then launches nothing either.
    """

    mark: SelfTestMark | None = None
    _depth: int = attrs.field(default=0, init=False)
    _outer: RunningTest | None = attrs.field(default=None, init=False)
    _one_at_a_time: Lock = attrs.field(init=False, factory=Lock, eq=False, repr=False)

    @property
    def preparing(self) -> bool:
        """Whether what it does just now is no launch."""
        return self._depth > 0

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, `preparing` speaks of this test, and the end of the process condemns the kernel."""
        self._outer = _RUNNING.get()
        token = _RUNNING.set(self)
        if self.mark is not None:
            self.mark.pending()
        try:
            yield
        finally:
            _RUNNING.reset(token)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, nothing is launched."""
        with nullcontext() if self._outer is None else self._outer.pause():
            self._deepen(1)
            try:
                yield
            finally:
                self._deepen(-1)

    def _deepen(self, by: int) -> None:
        with self._one_at_a_time:
            before, self._depth = self._depth, self._depth + by
            if self.mark is None or (before and self._depth):
                return
            if before:
                self.mark.pending()
            else:
                self.mark.lift()


# Runs a self-test; whether it ended within its time. What it raises passes.
Runner = Callable[[Callable[[], None], RunningTest], bool]


def run_directly(test: Callable[[], None], running: RunningTest) -> bool:
    """Without a limit, in this thread."""
    test()
    return True


def require_end(run: Runner, test: Callable[[], None], kernel: str) -> None:
    """Runs a test of which no verdict is kept. Raises what it raises, DeviceError where it does not end in time.

    kernel: for the message.
    """
    running = RunningTest()
    with running.going_on():
        if run(test, running):
            return
    raise DeviceError(
        f"{kernel}: the self-test did not end in time",
        fix="restart the process: the device does not answer this one any more; VT_SELF_TEST_SECONDS sets the time",
    )


@contextmanager
def preparing() -> Iterator[None]:
    """Inside, the self-test that this is a part of, if any, compiles and launches nothing."""
    running = _RUNNING.get()
    if running is None:
        yield
        return
    with running.pause():
        yield
