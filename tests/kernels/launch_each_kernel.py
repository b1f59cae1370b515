"""Launches every NVFP4 and FP8 kernel once or twice on shapes with tails, for a sanitizer to watch.

compute-sanitizer --report-api-errors no --tool memcheck python tests/kernels/launch_each_kernel.py
compute-sanitizer --report-api-errors no --tool racecheck python tests/kernels/launch_each_kernel.py --every-lane

--every-lane compiles the streaming kernels so that each lane arrives at a barrier for itself: racecheck credits an
arrival to the thread that makes it alone, and reports what one lane announces for its warp after __syncwarp.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import torch

from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_kernels.compiling import functions, nvrtc
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.nvfp4 import packed_widening, stored
from vtensors_kernels.nvfp4.embedding import bind_embedding
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stream import StreamArgmax, StreamLinear
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments

DTYPE = torch.bfloat16
# N and K that are no multiples of a tile, a step or a segment.
SHAPES = ((40, 272), (333, 2064), (16, 16))


def nvfp4(n: int, k: int) -> NVFP4Weight:
    """Random codes; a few scales."""
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
        block_scale=torch.empty(n, k // 16, device="cuda").uniform_(1, 16).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 64, device="cuda"),
    )


def x_of(m: int, k: int) -> torch.Tensor:
    """[m, k] of DTYPE."""
    return torch.randn(m, k, device="cuda").to(DTYPE)


def launch(n: int, k: int) -> None:
    """Every kernel on one shape."""
    weight, other = nvfp4(n, k), nvfp4(n, k)
    packed, pairs = pack([weight]), pack([weight, other], paired=True)
    residual, gain = x_of(32, n), torch.ones(k, device="cuda")
    for m in (1, 3, 16, 29):
        x = x_of(m, k)
        StreamLinear(packed, DTYPE)(x)
        StreamLinear(packed, DTYPE, "linear_add")(x, residual[:m].contiguous())
        StreamLinear(pairs, DTYPE, "linear_swiglu", "norm")(x, None, gain, 1e-6)
        StreamArgmax(packed, DTYPE)(x)
        stored.bind_linear(weight, DTYPE)(x)
    if torch.cuda.get_device_capability() == (9, 0):
        WgmmaSegments(packed, DTYPE)(x_of(27, k))
        WgmmaLinear(packed, DTYPE)(x_of(61, k))
    packed_widening.bind_linear(packed, DTYPE)(x_of(70, k))
    bind_embedding(weight)(torch.tensor([0, n - 1], device="cuda"), DTYPE)
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    fp8 = FP8Weight(codes=codes, scale=torch.full((n, 1), 0.5, device="cuda"))
    StreamLinear(pack_fp8([fp8]), DTYPE)(x_of(3, k))
    torch.cuda.synchronize()


def let_every_lane_arrive() -> None:
    """Add VT_EVERY_LANE to the options of every kernel compiled from now on."""
    plain = nvrtc.options_of

    def options(target: str, defines: Mapping[str, int]) -> tuple[str, ...]:
        return plain(target, {**defines, "VT_EVERY_LANE": 1})

    for module in (nvrtc, functions):
        setattr(module, "options_of", options)  # noqa: B010 (modules are not declared to be assigned to)


def main() -> None:
    """Launch everything on the first shapes."""
    parser = argparse.ArgumentParser(description="Launch every kernel once or twice.")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--every-lane", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"needs a CUDA device and a torch that sees it; torch {torch.__version__} sees none",
            file=sys.stderr,
        )
        raise SystemExit(2)
    toolkit = nvrtc.find_toolkit()
    if isinstance(toolkit, str):
        print(f"needs a compiler for the device: {toolkit}", file=sys.stderr)
        raise SystemExit(2)
    if args.every_lane:
        let_every_lane_arrive()
    torch.manual_seed(0)
    for shape in SHAPES[: args.shapes]:
        launch(*shape)
        print("launched every kernel on", shape, flush=True)


if __name__ == "__main__":
    main()
