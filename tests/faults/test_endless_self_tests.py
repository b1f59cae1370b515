"""Kernels that hang in their self-test or take the device with it: given up in time, and not tried again."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_specs import kernel, reference, request
from vtensors.errors import DeviceError
from vtensors.kernel_binding import BoundKernel, bind_plan
from vtensors.kernel_entries import DeviceIdentity
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import plan_kernels
from vtensors.verdicts import Verdicts
from vtensors_engine import runner_choice
from vtensors_engine.runner_choice import make_runner
from vtensors_kernels.time_limits import TimeLimit

CARD = DeviceIdentity(name="NVIDIA B300", uuid="GPU-1", driver="580.159.04")
BUILD = "NVRTC 13.0 sm_103a 3fa4b2"
GENERAL = kernel("linear_nvfp4_general", cost=50.0)
# A process of its own that tests `linear_nvfp4_new`: dies in it, waits in it for a line, or passes.
TESTER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kernel_specs import kernel, request
from vtensors.kernel_entries import DeviceIdentity
from vtensors.verdicts import Verdicts

def probe(asked):
    print("begun", flush=True)
    if sys.argv[3] == "die":
        os.kill(os.getpid(), 9)
    sys.stdin.readline()

card = DeviceIdentity(name="NVIDIA B300", uuid="GPU-1", driver="580.159.04")
new = kernel("linear_nvfp4_new", cost=1.0, probe=probe, fingerprint=lambda asked: "NVRTC 13.0 sm_103a 3fa4b2")
print(Verdicts(folder=Path(sys.argv[1]), device=card).failure(new, request(capability=(10, 3))), flush=True)
"""
TESTS = Path(__file__).parents[1]


@pytest.fixture
def hang() -> threading.Event:
    """What a launch that hangs waits for; set when the test is over, so that its thread ends."""
    return threading.Event()


def new_kernel(probe: object, build: str = BUILD) -> KernelSpec:
    return kernel("linear_nvfp4_new", cost=1.0, probe=probe, fingerprint=lambda asked: build)  # type: ignore[arg-type]


def verdicts(folder: Path | None, seconds: float = 0.1) -> Verdicts:
    limit = TimeLimit(seconds=seconds, device=torch.device("cpu"))
    return Verdicts(folder=folder, device=CARD, run=limit)


def bound(new: KernelSpec, tests: Verdicts, asked: KernelRequest | None = None) -> BoundKernel:
    plan = plan_kernels(asked or request(capability=(10, 3)), [new, GENERAL, reference()])
    return bind_plan(plan, ["weight"], tests)


def marks(folder: Path) -> list[Path]:
    return list((folder / "self-tests").iterdir())


@pytest.mark.fault("B73")
def test_a_kernel_that_hangs_is_given_up_with_its_name_card_architecture_and_toolkit(
    tmp_path: Path, hang: threading.Event
) -> None:
    try:
        with pytest.raises(
            DeviceError, match="linear_nvfp4_new on NVIDIA B300: the self-test did not end"
        ) as caught:
            bound(new_kernel(lambda asked: hang.wait(60)), verdicts(tmp_path))
    finally:
        hang.set()
    (path,) = marks(tmp_path)
    for words in ("for sm_103", BUILD, "restart the process", "will not be tried again", str(path)):
        assert words in str(caught.value)
    assert not (tmp_path / "verdicts").exists()


@pytest.mark.fault("B73")
def test_the_process_of_a_kernel_that_hangs_launches_nothing_else_on_that_card(
    tmp_path: Path, hang: threading.Event
) -> None:
    launched: list[KernelRequest] = []
    try:
        with pytest.raises(DeviceError):
            bound(new_kernel(lambda asked: hang.wait(60)), verdicts(tmp_path))
        with pytest.raises(DeviceError, match="did not end in time"):
            bound(
                new_kernel(launched.append), verdicts(tmp_path), request(capability=(10, 3), tokens=(1, 32))
            )
    finally:
        hang.set()
    assert launched == []


@pytest.mark.fault("B73")
def test_without_a_folder_the_message_says_how_to_leave_the_kernel_out(hang: threading.Event) -> None:
    try:
        with pytest.raises(DeviceError) as caught:
            bound(new_kernel(lambda asked: hang.wait(60)), verdicts(None))
    finally:
        hang.set()
    assert "VT_KERNELS='*:!linear_nvfp4_new'" in str(caught.value)


@pytest.mark.fault("B73")
def test_after_a_process_that_died_in_a_self_test_the_next_takes_another_kernel_and_says_why(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", TESTER, str(tmp_path), str(TESTS), "die"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    launched: list[KernelRequest] = []
    # Of another shape, too: it is the kernel as built that hangs.
    for asked in (request(capability=(10, 3)), request(capability=(10, 3), tokens=(1, 32))):
        found = bound(new_kernel(launched.append), verdicts(tmp_path), asked)
        assert found.segments[0].kernel is GENERAL
        (reason,) = [reason for name, reason in found.rejected if name == "linear_nvfp4_new"]
        (path,) = marks(tmp_path)
        assert reason.startswith(f"failed its self-test ({BUILD}): on this card one never ended (")
        assert f"delete {path} to try it again" in reason
    assert launched == []
    another = new_kernel(launched.append, "NVRTC 13.2 sm_103a 81c2")
    assert bound(another, verdicts(tmp_path)).segments[0].kernel is another
    path.unlink()
    assert bound(new_kernel(launched.append), verdicts(tmp_path)).rejected == ()
    assert len(launched) == 2


@pytest.mark.fault("B73")
def test_two_processes_that_test_one_kernel_at_a_time_do_not_condemn_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TESTER, str(tmp_path), str(TESTS), "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        launched: list[KernelRequest] = []
        found = bound(
            new_kernel(launched.append), verdicts(tmp_path), request(capability=(10, 3), tokens=(1, 32))
        )
        assert found.segments[0].kernel.name == "linear_nvfp4_new"
        assert len(launched) == 1
        assert other.communicate("\n")[0] == "None\n"
    again = bound(new_kernel(launched.append), verdicts(tmp_path), request(capability=(10, 3), tokens=(1, 8)))
    assert again.segments[0].kernel.name == "linear_nvfp4_new"
    assert [path.read_text() for path in marks(tmp_path)] == [""]


@pytest.mark.fault("B73")
def test_a_kernel_that_takes_the_device_with_it_is_not_tried_again_either(tmp_path: Path) -> None:
    launched: list[KernelRequest] = []

    def fault(asked: KernelRequest) -> None:
        launched.append(asked)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def check() -> None:
        if launched:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    tests = verdicts(tmp_path, 5)
    tests.check = check
    with pytest.raises(DeviceError, match="took the device with it: RuntimeError: CUDA error: an illegal"):
        bound(new_kernel(fault), tests)
    script = TESTER.replace("print(Verdicts", "print('told', Verdicts")
    command = [sys.executable, "-c", script, str(tmp_path), str(TESTS), "pass"]
    done = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith(
        f"told failed its self-test ({BUILD}): on this card one took the device with it"
    )


@pytest.mark.fault("B73")
def test_a_kernel_is_not_blamed_for_a_device_that_was_lost_before(tmp_path: Path) -> None:
    def silent() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    launched: list[KernelRequest] = []
    tests = verdicts(tmp_path, 5)
    tests.check = silent
    with pytest.raises(
        DeviceError, match="no kernel can be tested: RuntimeError: CUDA error: device-side assert"
    ):
        bound(new_kernel(launched.append), tests)
    assert launched == []
    assert [path.read_text() for path in marks(tmp_path)] == [""]


@pytest.mark.fault("B73")
def test_a_kernel_that_only_fails_is_tried_again_by_the_next_process(tmp_path: Path) -> None:
    launched: list[KernelRequest] = []

    def wrong(asked: KernelRequest) -> None:
        launched.append(asked)
        raise RuntimeError("relative error 0.7")

    for _ in range(2):
        assert bound(new_kernel(wrong), verdicts(tmp_path, 5)).segments[0].kernel is GENERAL
    assert len(launched) == 2
    assert [path.read_text() for path in marks(tmp_path)] == [""]


@pytest.mark.fault("B73")
def test_a_user_who_stops_a_load_condemns_nothing(tmp_path: Path) -> None:
    def stopped(asked: KernelRequest) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bound(new_kernel(stopped), verdicts(tmp_path, 5))
    assert [path.read_text() for path in marks(tmp_path)] == [""]


@pytest.mark.fault("B73")
def test_no_other_runner_is_made_on_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object) -> Any:
        raise DeviceError("paged attention: the self-test did not end in time")

    monkeypatch.setattr(runner_choice, "_cuda_runner", hangs)
    model: Any = SimpleNamespace(device=torch.device("cuda:0"))
    with pytest.raises(DeviceError, match="paged attention"):
        make_runner(model, max_sequences=1)
