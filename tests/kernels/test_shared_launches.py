"""One launch used by several threads: the driver reads the arguments and the stream of the thread that called."""

from __future__ import annotations

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


def test_threads_that_share_a_launch_launch_their_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(CUlaunchConfig=Config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    seen: list[tuple[int, int, int]] = []

    def driver(*_: object) -> int:
        # As ctypes does during a call: other threads run.
        time.sleep(0.002)
        seen.append((made._config.hStream, *made._slots))
        return 0

    monkeypatch.setattr(launching, "_driver_launch", lambda: driver)
    function = DeviceFunction(name="f", target="sm_90a", handle=1, module=None)
    made = Launch(function=function, grid=(1, 1, 1), block=(32, 1, 1), arguments=2)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(made.call, i, 10 * i, 100 * i) for i in range(1, 40)]:
            done.result()
    assert sorted(seen) == [(i, 10 * i, 100 * i) for i in range(1, 40)]
