"""One launch used by several threads: the driver reads the arguments and the stream of the thread that called."""

from __future__ import annotations

import ctypes
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from vtensors_kernels.compiling import launch as launching
from vtensors_kernels.compiling.launch import DeviceFunction, Launch


class Config:
    """Stands for `CUlaunchConfig`."""

    hStream = 0

    def getPtr(self) -> int:
        return 1


class Driver:
    """Stands for the driver. seen: of every launch the stream, then the parameters in the kernel's order."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def made(self, arguments: int, constants: dict[int, int]) -> Launch:
        function = DeviceFunction(name="f", target="sm_90a", handle=1, module=None)
        self.launch = Launch(
            function=function, grid=(1, 1, 1), block=(32, 1, 1), arguments=arguments, constants=constants
        )
        return self.launch

    def __call__(self, _config: int, _function: int, parameters: int, _extra: object) -> int:
        # As ctypes does during a call: other threads run.
        time.sleep(0.002)
        pointers = (ctypes.POINTER(ctypes.c_uint64) * self.launch.arguments).from_address(parameters)
        self.seen.append((self.launch._config.hStream, *(pointer[0] for pointer in pointers)))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(CUlaunchConfig=Config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    found = Driver()
    monkeypatch.setattr(launching, "_driver_launch", lambda: found)
    return found


def test_threads_that_share_a_launch_launch_their_own_arguments(driver: Driver) -> None:
    made = driver.made(2, {})
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(made.call, i, 10 * i, 100 * i) for i in range(1, 40)]:
            done.result()
    assert sorted(driver.seen) == [(i, 10 * i, 100 * i) for i in range(1, 40)]


def test_constants_keep_their_places_among_what_a_call_gives(driver: Driver) -> None:
    made = driver.made(5, {3: 33, 0: 30})
    made.call(7, 1, 2, 4)
    made.call(8, 5, 6, 2**63)
    assert driver.seen == [(7, 30, 1, 2, 33, 4), (8, 30, 5, 6, 33, 2**63)]


def test_a_call_that_gives_too_few_or_too_many_is_no_launch(driver: Driver) -> None:
    made = driver.made(3, {1: 5})
    for arguments in ((1,), (1, 2, 3)):
        with pytest.raises(ValueError, match="size"):
            made.call(7, *arguments)
    assert not driver.seen
