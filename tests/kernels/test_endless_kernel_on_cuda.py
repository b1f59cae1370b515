"""A kernel that does not end in its time, on a device: the process says so and ends, and no other tries it again."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "endless_kernel.py"
SPIN = 6.0
# A thread that waits for the device while the interpreter ends may abort it when the kernel ends after all.
ENDED, ABORTED = 0, -6


def run(*words: object) -> tuple[list[str], str, int]:
    """The lines of the process, all that is to be known of it, and its exit status; killed after a minute."""
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = f"{done.stdout}{done.stderr}\n{time.time():.2f} exit status {done.returncode}"
    print(told)
    return done.stdout.splitlines(), told, done.returncode


@pytest.mark.fault("B73")
def test_a_kernel_that_spins_is_given_up_the_process_ends_and_the_next_one_does_not_launch_it(
    tmp_path: Path,
) -> None:
    lines, told, status = run(tmp_path, SPIN, 1.0)
    ended = time.time()
    (launched,) = [float(line.split()[0]) for line in lines if line.endswith(" launched")]
    assert sum("DeviceError: linear_spinning on" in line for line in lines) == 2, told
    assert "the self-test did not end in time" in told
    assert "NVRTC by hand" in told
    assert lines[-1].endswith("the end"), told
    assert status in (ENDED, ABORTED), told
    # It did not wait for the kernel, which might never end.
    assert ended - launched < SPIN, told
    lines, told, status = run(tmp_path, 0.0, 20.0, "forgive")
    assert status == ENDED, told
    verdicts = [line.partition(": ")[2] for line in lines if " M = " in line]
    reason = "failed its self-test (NVRTC by hand): on this card one did not end in time ("
    assert [verdict.startswith(reason) for verdict in verdicts] == [True, True, False], told
    assert verdicts[2] == "None", told
    assert sum(line.endswith(" launched") for line in lines) == 1, told
