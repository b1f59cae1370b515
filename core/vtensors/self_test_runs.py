"""How a self-test runs: what it compiles counts neither against its time nor against its kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import attrs

from vtensors.errors import DeviceError
from vtensors.self_test_marks import SelfTestMark

_RUNNING: ContextVar[RunningTest | None] = ContextVar("vtensors_running_test", default=None)


@attrs.define(kw_only=True)
class RunningTest:
    """A self-test that goes on. mark: of its kernel, where one is kept. preparing: whether it compiles just now."""

    mark: SelfTestMark | None = None
    _depth: int = attrs.field(default=0, init=False)

    @property
    def preparing(self) -> bool:
        """Whether what it does just now is no launch."""
        return self._depth > 0

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, `preparing` speaks of this test, and the end of the process condemns the kernel."""
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
        self._depth += 1
        if self._depth == 1 and self.mark is not None:
            self.mark.lift()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self.mark is not None:
                self.mark.pending()


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
