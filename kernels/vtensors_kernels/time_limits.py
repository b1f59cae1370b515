"""`VT_SELF_TEST_SECONDS`: how long a self-test on a device may take before its kernel counts as one that never ends.

A test waits for the device in many places, and a host that waits cannot be called back. So it runs in a thread of its
own, with the device, stream and modes of its caller, who counts. Where time is over, or the user interrupts, the thread
is left behind: it ends where it next runs Python, and what hangs in the driver with the process. What is compiled does
not count, and neither does a process that was stopped.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from threading import Event, Thread

import attrs
import torch

from vtensors.self_test_runs import RunningTest
from vtensors.switches import Switches

SWITCH = "VT_SELF_TEST_SECONDS"
_STEP_SECONDS = 0.05
# For a thread that was left behind, at the end of the process: it ends at once, unless it hangs.
_LAST_SECONDS = 1.0


@attrs.frozen(kw_only=True)
class TimeLimit:
    """Runs tests on one device within a limit. seconds: 0 = none, and no thread."""

    seconds: float
    device: torch.device

    def __call__(self, test: Callable[[], None], running: RunningTest) -> bool:
        """Whether the test ended in time. What it raises passes."""
        if not self.seconds:
            test()
            return True
        outcome = _Outcome()
        work = _in_place_of_caller(self.device, outcome, test)
        context = contextvars.copy_context()
        thread = Thread(target=context.run, args=(work,), name="vtensors-self-test", daemon=True)
        thread.start()
        ended = False
        try:
            ended = self._ends(outcome, running)
        finally:
            if not ended:
                _leave_behind(thread)
        if outcome.problem is not None and ended:
            raise outcome.problem
        return ended

    def _ends(self, outcome: _Outcome, running: RunningTest) -> bool:
        # Steps, not a clock: a process that was stopped comes back to a test that was stopped with it.
        left = self.seconds
        step = min(_STEP_SECONDS, left)
        while not outcome.done.wait(step):
            if not running.preparing:
                left -= step
            if left <= 0:
                return False
        return True


def time_limit(switches: Switches, device: torch.device) -> TimeLimit:
    """The limit that the switch sets."""
    return TimeLimit(seconds=switches.seconds(SWITCH), device=device)


@attrs.define
class _Outcome:
    done: Event = attrs.field(factory=Event, init=False)
    problem: BaseException | None = attrs.field(default=None, init=False)


def _leave_behind(thread: Thread) -> None:
    """Ends the thread where it next runs Python. The end of the process waits a moment for that.

    A daemon thread that comes back out of torch's C++ to an interpreter that has ended takes the process with it:
    `std::terminate`, in place of the exit status (CPython up to 3.13).
    """
    if thread.is_alive() and thread.ident is not None:
        ended = ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ended)
        atexit.register(thread.join, _LAST_SECONDS)


def _in_place_of_caller(
    device: torch.device, outcome: _Outcome, test: Callable[[], None]
) -> Callable[[], None]:
    """The test with what torch keeps per thread taken from this one."""
    on_device = device.type == "cuda" and torch.cuda.is_available()
    current = torch.cuda.current_device() if on_device else None
    stream = torch.cuda.current_stream(device) if on_device else None
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def work() -> None:
        try:
            with ExitStack() as modes:
                if stream is not None:
                    modes.enter_context(torch.cuda.stream(stream))
                    # Makes the device's context this thread's: the driver launches in no other, torch sets it late.
                    stream.query()
                if current is not None:
                    modes.enter_context(torch.cuda.device(current))
                if inference:
                    modes.enter_context(torch.inference_mode())
                modes.enter_context(torch.set_grad_enabled(gradients))
                test()
        except BaseException as problem:  # told in the thread that waits, SystemExit and its like too
            outcome.problem = problem
        finally:
            outcome.done.set()

    return work
