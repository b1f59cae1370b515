"""Host microseconds of one launch: the path alone, and whole calls of bound linears.

    python benchmarks/host_time.py --json benchmarks/results/host-time-h200.json

A time is the median over rounds of as many calls as the driver queues without waiting for the device, divided by
their number; the device is idle when a round begins. `launch`: what a launch costs: the arguments of a call set among
the constant ones, and all handed to the driver on torch's current stream. `driver`: the driver's share of it, with
arguments that are set already. `into out`: a whole call of a bound linear, checked, with an output to write into;
`new output`: torch allocates one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda_device import require_cuda
from measured_on import measured_on

from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.stream_launches import EPILOGUES, PROLOGUES, StreamLaunches

# Fewer than the driver's queue of launches holds.
CALLS, ROUNDS = 400, 21
SHAPE = (512, 512)


def host_microseconds(call: Callable[[], object]) -> float:
    """Median over rounds of one call's time on the host."""
    times = []
    gc.disable()
    try:
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - begin) / CALLS * 1e6)
    finally:
        gc.enable()
    return statistics.median(times[1:])


def measure() -> dict[str, float]:
    """Name -> host microseconds."""
    n, k = SHAPE
    weight = NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
        block_scale=torch.empty(n, k // 16, device="cuda").uniform_(24, 160).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 8192, device="cuda"),
    )
    packed = pack([weight])
    x = torch.randn(1, k, device="cuda").bfloat16()
    out = torch.empty(1, n, device="cuda", dtype=torch.bfloat16)
    launches = StreamLaunches(packed, torch.bfloat16, (EPILOGUES["linear"], PROLOGUES["plain"]))
    linear = StreamLinear(packed, torch.bfloat16)
    addresses = 1, x.data_ptr(), out.data_ptr(), 0, 0
    launches.run(*addresses)
    linear(x, out=out)
    launch = launches.launch_for(1)
    return {
        "driver": round(host_microseconds(partial(launch._launch, *launch._where, launch._address, None)), 2),
        "launch": round(host_microseconds(lambda: launches.run(*addresses)), 2),
        "into out": round(host_microseconds(lambda: linear(x, out=out)), 2),
        "new output": round(host_microseconds(lambda: linear(x)), 2),
    }


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    args = parser.parse_args()
    require_cuda()
    found = measure()
    for name, microseconds in found.items():
        print(f"{name:12} {microseconds:6.2f} us")
    record: dict[str, Any] = {
        **measured_on(args.commit),
        "calls": CALLS,
        "rounds": ROUNDS,
        "host_microseconds": found,
    }
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
