"""The time that a self-test has: what counts, what passes through, and what is left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vtensors
from vtensors.errors import DeviceError, VtensorsError
from vtensors.self_test_marks import SelfTestMark
from vtensors.self_test_runs import RunningTest, preparing, require_end
from vtensors_kernels.self_tests import verdicts_for
from vtensors_kernels.time_limits import TimeLimit

CPU = torch.device("cpu")
# A process whose test goes on in torch when it is given up, or interrupted by the user.
LEAVER = """
import os, signal, sys, threading, torch
from vtensors.errors import DeviceError
from vtensors.self_test_runs import require_end
from vtensors_kernels.time_limits import TimeLimit

def endless():
    x = torch.ones(500, 500)
    while True:
        x = (x @ x).clamp(-1, 1)

how, seconds = sys.argv[1], 0.2
if how == "interrupt":
    seconds = 60.0
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    require_end(TimeLimit(seconds=seconds, device=torch.device("cpu")), endless, "the norm kernel")
except (DeviceError, KeyboardInterrupt) as problem:
    print(type(problem).__name__, flush=True)
    sys.exit(7)
"""
CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-llmcompressor-nvfp4a16"


class DeviceThatHangs:
    """An event of a device whose launch never ends, until the test that made it does."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def synchronize(self) -> None:
        """As a host waits: for ever."""
        self._over.wait(60)

    def end(self) -> None:
        """Lets the thread go."""
        self._over.set()


def run(test: Callable[[], None], seconds: float = 0.2) -> bool:
    running = RunningTest()
    with running.going_on():
        return TimeLimit(seconds=seconds, device=CPU)(test, running)


def test_a_launch_that_hangs_is_given_up_when_its_time_is_over() -> None:
    device, begin = DeviceThatHangs(), time.monotonic()
    try:
        assert not run(device.synchronize)
        assert 0.1 < time.monotonic() - begin < 20
        with pytest.raises(DeviceError, match="the norm kernel: the self-test did not end in time") as caught:
            require_end(TimeLimit(seconds=0.1, device=CPU), device.synchronize, "the norm kernel")
        assert "VT_SELF_TEST_SECONDS" in str(caught.value)
    finally:
        device.end()


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    device = DeviceThatHangs()
    try:
        assert not run(device.synchronize, 0.05)
        left = [thread for thread in threading.enumerate() if thread.name == "vtensors-self-test"]
        assert left
        assert all(thread.daemon for thread in left)
    finally:
        device.end()


@pytest.mark.parametrize(("how", "told"), [("limit", "DeviceError"), ("interrupt", "KeyboardInterrupt")])
def test_a_process_that_left_a_test_behind_ends_with_its_own_status(how: str, told: str) -> None:
    command = [sys.executable, "-c", LEAVER, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == (f"{told}\n", 7), done.stderr


def test_a_test_that_is_given_up_ends_where_it_next_runs_python() -> None:
    begun = threading.Event()

    def endless() -> None:
        begun.set()
        while True:
            time.sleep(0.01)

    before = set(threading.enumerate())
    assert not run(endless, 0.1)
    assert begun.is_set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_what_is_compiled_does_not_count() -> None:
    def compiles() -> None:
        with preparing(), preparing():
            time.sleep(0.5)

    assert run(compiles)
    assert not run(lambda: time.sleep(0.5))


def test_what_a_test_within_a_test_compiles_does_not_count_for_either(tmp_path: Path) -> None:
    mark = SelfTestMark(path=tmp_path / "a.json", key="{}")
    assert mark.take() is None
    outer, texts = RunningTest(mark=mark), []

    def compiles() -> None:
        with preparing():
            texts.append(mark.path.read_text())
            time.sleep(0.5)

    with outer.going_on():
        assert TimeLimit(seconds=0.2, device=CPU)(lambda: print(run(compiles)), outer)
        texts.append(mark.path.read_text())
    assert ["pending" in text for text in texts] == [False, True]


def test_no_thread_of_a_test_compiles_under_a_mark_that_another_is_about_to_lift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = SelfTestMark(path=tmp_path / "a.json", key="{}")
    assert mark.take() is None
    running, texts, first = RunningTest(mark=mark), [], threading.Event()
    lift = SelfTestMark.lift

    def slowly(self: SelfTestMark) -> None:
        first.set()
        time.sleep(0.2)
        lift(self)

    def compiles() -> None:
        with running.pause():
            texts.append(mark.path.read_text())

    monkeypatch.setattr(SelfTestMark, "lift", slowly)
    with running.going_on():
        thread = threading.Thread(target=compiles)
        thread.start()
        assert first.wait(10)
        compiles()
        thread.join()
        assert "pending" in mark.path.read_text()
    assert texts == ["", ""]


def test_what_a_test_raises_reaches_the_caller_as_it_is() -> None:
    def fails(problem: BaseException) -> Callable[[], None]:
        def test() -> None:
            raise problem

        return test

    for problem in (VtensorsError("off by one"), RuntimeError("no image"), SystemExit(3)):
        with pytest.raises(type(problem)) as caught:
            run(fails(problem))
        assert caught.value is problem


@pytest.mark.parametrize("seconds", [0, 5])
def test_a_test_has_the_modes_of_its_caller(seconds: float) -> None:
    seen: list[tuple[bool, bool]] = []

    def test() -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    assert run(test, seconds)
    with torch.no_grad():
        assert run(test, seconds)
    with torch.inference_mode():
        assert run(test, seconds)
    assert seen == [(False, True), (False, False), (True, False)]


def test_a_limit_of_zero_is_none_and_makes_no_thread() -> None:
    threads: list[threading.Thread] = []
    assert run(lambda: threads.append(threading.current_thread()), 0)
    assert run(lambda: threads.append(threading.current_thread()), 5)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threads[0]


def test_while_it_compiles_the_end_of_the_process_says_nothing_about_a_kernel(tmp_path: Path) -> None:
    texts: list[str] = []
    mark = SelfTestMark(path=tmp_path / "a.json", key="{}")
    assert mark.take() is None
    running = RunningTest(mark=mark)

    def test() -> None:
        texts.append(mark.path.read_text())
        with preparing():
            texts.append(mark.path.read_text())
        texts.append(mark.path.read_text())

    with running.going_on():
        assert TimeLimit(seconds=5, device=CPU)(test, running)
    assert ["pending" in text for text in texts] == [True, False, True]


def test_a_load_takes_limit_and_strictness_from_the_switches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = SimpleNamespace(name="A card", uuid="1234-5678")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setenv("VT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VT_SELF_TEST_SECONDS", "7.5")
    monkeypatch.setenv("VT_STRICT", "untested")
    device = torch.device("cuda:0")
    verdicts = verdicts_for(vtensors.open_checkpoint(CHECKPOINT), device)
    assert verdicts is not None
    assert verdicts.run == TimeLimit(seconds=7.5, device=device)
    assert verdicts.refuse_untested
