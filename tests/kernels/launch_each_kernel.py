"""Launches every kernel once or twice on small shapes with tails, for a sanitizer to watch.

python tests/kernels/launch_each_kernel.py --every-lane    # compiles what the sanitizers then take from the cache
compute-sanitizer --report-api-errors no --tool memcheck python tests/kernels/launch_each_kernel.py
compute-sanitizer --report-api-errors no --tool racecheck python tests/kernels/launch_each_kernel.py --every-lane

--every-lane compiles the streaming kernels so that each lane arrives at a barrier for itself: racecheck credits an
arrival to the thread that makes it alone, and reports what one lane announces for its warp after __syncwarp.
--list names the parts, --only NAME launches one of them. Kernels for this device that nothing here launched are named
at the end, with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from vtensors_kernels.compiling import functions, nvrtc
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.instantiations import all_instantiations
from vtensors_kernels.compiling.launch import Launch


def let_every_lane_arrive() -> None:
    """Add VT_EVERY_LANE to the options of every kernel compiled from now on."""
    plain = nvrtc.options_of

    def options(target: str, defines: Mapping[str, int]) -> tuple[str, ...]:
        return plain(target, {**defines, "VT_EVERY_LANE": 1})

    for module in (nvrtc, functions):
        setattr(module, "options_of", options)  # noqa: B010 (modules are not declared to be assigned to)


def note_launches() -> set[str]:
    """The names of the kernels that are launched from now on."""
    names: set[str] = set()
    plain = Launch.call

    def call(self: Launch, *arguments: Any) -> None:
        names.add(self.function.name)
        plain(self, *arguments)

    setattr(Launch, "call", call)  # noqa: B010 (nor are methods)
    return names


def never_launched(names: set[str]) -> list[str]:
    """Kernels that are compiled for the device and not among the names."""
    target = target_of(torch.cuda.get_device_capability())
    return sorted({one.function for one in all_instantiations() if target in one.targets} - names)


def main() -> None:
    """Launch the parts that are asked for."""
    parser = argparse.ArgumentParser(description="Launch every kernel once or twice.")
    parser.add_argument("--only", help="one part")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--shapes", type=int, help="as many of them at most")
    parser.add_argument("--every-lane", action="store_true")
    args = parser.parse_args()
    if not args.list and not torch.cuda.is_available():
        print(
            f"needs a CUDA device and a torch that sees it; torch {torch.__version__} sees none",
            file=sys.stderr,
        )
        raise SystemExit(2)
    toolkit = nvrtc.find_toolkit()
    if not args.list and isinstance(toolkit, str):
        print(f"needs a compiler for the device: {toolkit}", file=sys.stderr)
        raise SystemExit(2)
    # Beside this script, whose folder is on the path only where it is run.
    from small_launches import PARTS, SHAPES

    if args.list:
        print("\n".join(PARTS))
        return
    if args.only is not None and args.only not in PARTS:
        parser.error(f"no part is called {args.only!r}; the parts are {', '.join(PARTS)}")
    if args.every_lane:
        let_every_lane_arrive()
    names = note_launches()
    torch.manual_seed(0)
    for name, launch in PARTS.items():
        if args.only in (None, name):
            begin = time.perf_counter()
            for shape in SHAPES[: args.shapes]:
                launch(*shape)
            torch.cuda.synchronize()
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    print(f"launched {len(names)} kernels: {', '.join(sorted(names))}")
    missing = [] if args.only else never_launched(names)
    if missing:
        print(f"never launched: {', '.join(missing)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
