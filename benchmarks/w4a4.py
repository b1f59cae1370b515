"""Times of NVFP4 linears with 16-bit and with 4-bit activations, by the kernels that the selection picks, in one run.

    python benchmarks/w4a4.py --json w4a4.json
    python benchmarks/w4a4.py --shapes down,o_out --tokens 1,16,64,2048

A time is the median of replays of a CUDA graph of calls whose weights rotate over three times the L2 cache; with 4-bit
activations the launch that quantizes them is part of the call. Each kernel passes its self-test before it is timed; one
that does not is named with its reason, and the next is timed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from cuda_device import require_cuda
from linear_goals import SHAPES
from measured_on import measured_on

from vtensors.errors import VtensorsError
from vtensors.kernel_plans import KernelPlan
from vtensors.records import KernelRequest
from vtensors.selection import plan_kernels, replan
from vtensors_kernels.timing import measure
from vtensors_plugins.backends import cuda, reference

TOKENS = (1, 8, 16, 32, 64, 256, 2048)
MODES = ("16bit", "fp4")
_NVFP4_BYTES = 9 / 16


def main() -> None:
    """Prints a line per shape and number of rows; writes the record where one is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    arguments = parser.parse_args()
    require_cuda()
    record: dict[str, Any] = {**measured_on(arguments.commit), "rows": []}
    for name in arguments.shapes.split(","):
        for tokens in map(int, arguments.tokens.split(",")):
            entry = measured(name, tokens)
            record["rows"].append(entry)
            print(line(entry), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measured(name: str, tokens: int) -> dict[str, Any]:
    """Kernel and microseconds of both modes at a shape and number of rows."""
    n, k = SHAPES[name]
    found: dict[str, Any] = {"shape": name, "n": n, "k": k, "tokens": tokens}
    for mode in MODES:
        request = KernelRequest(
            op="linear",
            scheme="nvfp4",
            activations=mode,
            device="cuda:0",
            capability=torch.cuda.get_device_capability(),
            dtype="bfloat16",
            shape=(n, k),
            parts=(n,),
            tokens=(tokens, tokens),
        )
        plan = plan_kernels(request, [*reference.vtensors_kernels(), *cuda.vtensors_kernels()])
        found[mode] = timed(plan)
    return found


def timed(plan: KernelPlan) -> dict[str, Any]:
    """The first kernel of the plan that passes its self-test, its time, and why others failed."""
    failed: dict[str, str] = {}
    while True:
        kernel = plan.segments[0].kernel
        try:
            if kernel.probe is not None:
                kernel.probe(plan.request)
            microseconds = measure(kernel, plan.request)
        except (VtensorsError, RuntimeError) as problem:
            failed[kernel.name] = str(problem).splitlines()[0]
            plan = replan(plan, failed)
            continue
        n, k = plan.request.shape or (0, 0)
        gigabytes = n * k * _NVFP4_BYTES / microseconds / 1e3
        return {
            "kernel": kernel.name,
            "microseconds": microseconds,
            "gigabytes_per_second": gigabytes,
            "failed": failed,
        }


def line(entry: dict[str, Any]) -> str:
    """`gate_up 34816 x 5120, M = 1: linear_nvfp4_stream 27.1 us (3701 GB/s); linear_nvfp4_w4a4_... 29.4 us (...)`."""
    told = [
        f"{entry[mode]['kernel']} {entry[mode]['microseconds']:.1f} us "
        f"({entry[mode]['gigabytes_per_second']:.0f} GB/s)"
        for mode in MODES
    ]
    failed = [f"\n    {name}: {reason}" for mode in MODES for name, reason in entry[mode]["failed"].items()]
    return (
        f"{entry['shape']} {entry['n']} x {entry['k']}, M = {entry['tokens']}: "
        + "; ".join(told)
        + "".join(failed)
    )


if __name__ == "__main__":
    main()
