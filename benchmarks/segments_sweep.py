"""Forms of `linear_nvfp4_wgmma_segments` on an H200: bits compared with `linear_nvfp4_stream`, then timed.

    python benchmarks/segments_sweep.py [--seconds 60] [--shapes gate_up,down] [--tokens 32,24]

A line: shape, tokens, form (width, warpgroups, cluster, blocks, column steps x copies of a ring, stages of x, depth),
median microseconds, the model's, and the stream kernel's time as a ratio. `*` marks the form that is shipped.
Otherwise as in `wgmma_sweep.py`.
"""

from __future__ import annotations

import argparse
import os
import traceback

import attrs
import torch
from cuda_device import require_cuda
from torch import Tensor
from wgmma_sweep import ROTATED, SHAPES, microseconds, supervise, weight

from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.nvfp4.packed import FORMAT, PackedNVFP4
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.wgmma import WgmmaWorkspace
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments
from vtensors_kernels.nvfp4.wgmma_segments_form import (
    SegmentsForm,
    candidates,
    choose_form,
    modelled_time,
)

SOURCE, FUNCTION = FORMAT.segments or ("", "")
LARGE = ("gate_up", "down", "in_qkvz", "attn_qkv", "o_out", "lm_head")
# Other rings of each number of warpgroups.
RINGS = {2: [(2, 6), (4, 4)], 3: [(2, 4), (3, 3)], 4: [(2, 3), (2, 2)], 5: []}


def forms_of(n: int, k: int, tokens: int) -> list[SegmentsForm]:
    """The shipped form, the best by the model for each size of a block and cluster, other rings of the best."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = choose_form(n, k, tokens, count)
    ranked = sorted(
        candidates(n, 24 if tokens <= 24 else 32, count), key=lambda form: modelled_time(n, k, form)
    )
    best = {(form.warpgroups, form.cluster): form for form in reversed(ranked)}
    every = [chosen, *best.values()]
    if tokens > 24:
        every += [attrs.evolve(chosen, chunk=c, slots=s) for c, s in RINGS[chosen.warpgroups]]
        every += [attrs.evolve(best[5, 1], depth=1)]
        # The whole device, cut anywhere.
        every.append(attrs.evolve(chosen, blocks=count // chosen.cluster * chosen.cluster).fitted(n))
    else:
        every.append(choose_form(n, k, 32, count))
    return list(dict.fromkeys(every))


def work(names: list[str], tokens: list[int]) -> None:
    """Everything for these shapes, printed."""
    workspace = WgmmaWorkspace(device=torch.device("cuda", 0))
    every = dict.fromkeys(form for name in names for m in tokens for form in forms_of(*SHAPES[name][:2], m))
    compile_many(
        [
            Wanted(
                source=SOURCE,
                name=FUNCTION,
                defines=tuple({**form.defines, "VT_F16": 0, "VT_EPILOGUE": 0}.items()),
                shared_bytes=form.shared_bytes,
            )
            for form in every
        ],
        0,
    )
    for name in names:
        n, k, _ = SHAPES[name]
        packed = weight(n, k)
        copies = [packed] + [
            attrs.evolve(packed, blocks=packed.blocks.clone())
            for _ in range(max(1, int(ROTATED // packed.blocks.nbytes)))
        ]
        print(f"@ {name}", flush=True)
        x = torch.randn(
            32, k, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)
        ).bfloat16()
        for m in tokens:
            streams = [StreamLinear(one, torch.bfloat16) for one in copies]
            wanted, of_stream = streams[0](x[:m]), microseconds(streams, x[:m])
            print(f"{name:8s} {m} stream {of_stream:.2f} us", flush=True)
            for index, form in enumerate(forms_of(n, k, m)):
                _one(f"{name:8s} {m}", form, index == 0, copies, x[:m], wanted, workspace, of_stream)
        del copies, packed


def _one(
    what: str,
    form: SegmentsForm,
    shipped: bool,
    copies: list[PackedNVFP4],
    x: Tensor,
    wanted: Tensor,
    workspace: WgmmaWorkspace,
    of_stream: float,
) -> None:
    ring = f"{form.chunk}x{form.slots}"
    what += (
        f" n{form.tokens}w{form.warpgroups}c{form.cluster} b{form.blocks} {ring} s{form.stages}d{form.depth}"
    )
    what += "*" if shipped else ""
    try:
        linears = [WgmmaSegments(one, torch.bfloat16, workspace=workspace, forms=(form,)) for one in copies]
        workspace.poison()
        different = [int((linears[0](x) != wanted).sum()) for _ in range(2)]
        bits = "" if different == [0, 0] else f" BITS {different} of {wanted.numel()}"
        us = microseconds(linears, x)
        model = modelled_time(*copies[0].shape, form)
        print(f"{what} {us:.2f} us ({model:.1f}) x{of_stream / us:.2f}{bits}", flush=True)
    except Exception as problem:
        print(f"{what} FAILED {type(problem).__name__}: {str(problem)[:200]}", flush=True)
        if "CUDA" in str(problem) or "launch" in str(problem).lower():
            traceback.print_exc(limit=3)
            os._exit(3)  # the context is lost


def main() -> None:
    """Run workers until every shape is done or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shapes", default=",".join(LARGE))
    parser.add_argument("--tokens", default="32,24")
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    require_cuda("sm_90a")
    names = options.shapes.split(",")
    if options.worker:
        work(names, [int(m) for m in options.tokens.split(",")])
        return
    for line in supervise(__file__, names, options.seconds, ("--tokens", options.tokens)):
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
