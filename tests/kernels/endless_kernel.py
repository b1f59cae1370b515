"""A process that tests a kernel which spins: `python endless_kernel.py FOLDER SPIN_SECONDS LIMIT_SECONDS [forgive]`.

It prints a line a step, with the seconds since the epoch. The kernel ends by itself after SPIN_SECONDS, so that nothing
is left on the device. forgive: what stands against the kernel is deleted, and it is tested again.
"""

from __future__ import annotations

import sys
import time
from functools import lru_cache
from pathlib import Path

import torch

from vtensors.errors import DeviceError
from vtensors.records import KernelRequest, KernelSpec
from vtensors.verdicts import Verdicts
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.launch import Launch, current_stream, load_function
from vtensors_kernels.compiling.nvrtc import compile_source, find_toolkit
from vtensors_kernels.compiling.sources import Source
from vtensors_kernels.self_tests import device_identity
from vtensors_kernels.time_limits import TimeLimit

DEVICE = torch.device("cuda:0")
TEXT = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""


def main() -> None:
    """Tests the kernel for two requests and tells how each test ends."""
    folder, spin, limit = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    torch.zeros(1, device=DEVICE)
    # Of the second one nothing is launched: it is unloaded at the end, as the kernels of a model are.
    launch, _ = _spinning(1), _spinning(2)
    _tell("compiled and loaded")

    def probe(request: KernelRequest) -> None:
        _tell("launched")
        launch.call(current_stream(DEVICE), int(spin * 1e9))
        # As self-tests wait: in the middle of torch.
        float(torch.ones(4, device=DEVICE).sum())

    kernel = KernelSpec(
        name="linear_spinning",
        op="linear",
        schemes=("nvfp4",),
        targets=("cuda",),
        numerics="bitwise",
        refuse=lambda request: None,
        bind=lambda weight, request: print,
        probe=probe,
        fingerprint=lambda request: "NVRTC by hand",
    )
    for rows in (1, 2):
        _test(kernel, rows, folder, limit)
    if sys.argv[4:] == ["forgive"]:
        for mark in (folder / "self-tests").iterdir():
            mark.unlink()
        _test(kernel, 1, folder, limit)
    _tell("the end")


def _test(kernel: KernelSpec, rows: int, folder: Path, limit: float) -> None:
    request = KernelRequest(
        op="linear",
        scheme="nvfp4",
        activations="16bit",
        device="cuda:0",
        capability=torch.cuda.get_device_capability(DEVICE),
        dtype="bfloat16",
        shape=(64, 64),
        tokens=(rows, rows),
    )
    verdicts = Verdicts(
        folder=folder,
        device=device_identity(DEVICE),
        run=TimeLimit(seconds=limit, device=DEVICE),
        check=lambda: torch.cuda.synchronize(DEVICE),
    )
    try:
        _tell(f"M = {rows}: {verdicts.failure(kernel, request)}")
    except DeviceError as problem:
        _tell(f"M = {rows}: DeviceError: {' '.join(str(problem).split())}")


def _tell(words: str) -> None:
    print(f"{time.time():.2f} {words}", flush=True)


@lru_cache(maxsize=2)
def _spinning(number: int) -> Launch:
    toolkit, target = find_toolkit(), target_of(torch.cuda.get_device_capability(DEVICE))
    if isinstance(toolkit, str):
        raise SystemExit(toolkit)
    image = compile_source(Source(name="spin.cu", text=TEXT), target, {"NUMBER": number}, toolkit)
    function = load_function(image, "spin", target)
    return Launch(function=function, grid=(1, 1, 1), block=(1, 1, 1), arguments=1)


if __name__ == "__main__":
    main()
