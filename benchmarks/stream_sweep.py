"""Forms of `linear_*_stream` on a CUDA device, timed: what `nvfp4/stream_form.py` is tuned by.

    python benchmarks/stream_sweep.py [--scheme fp8-tensor] [--shapes gate_up,down] [--tokens 1,8,16,32] [--seconds 150]

Every result must have the bits of the shipped form's. Times are medians of CUDA graphs that rotate over more than
400 MB of weights; `*` marks the form that is shipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import attrs
import linear_goals as table
import torch
from cuda_device import require_cuda
from graph_timing import copies_of, time_calls
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.nvfp4 import stream_launches
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.stream_form import Rule, StreamForm, choose_form, form_of, rules_of
from vtensors_kernels.packed_matrix import PackedMatrix
from vtensors_kernels.random_weights import random_weights

SHOWN = 5


def forms_to_try(n: int, k: int, m: int, count: int, target: str, block_bytes: int) -> list[StreamForm]:
    """The shipped form first, then every other that fits, with rings and grids of several sizes."""
    found = [choose_form(n, k, m, count, target, block_bytes)]
    tiles = found[0].token_tiles
    for rule in _variations(target):
        form = form_of(rule, n, k, m, count, target, block_bytes) if rule.token_tiles == tiles else None
        if form is not None and form not in found:
            found.append(form)
    return found


def _variations(target: str) -> Iterator[Rule]:
    for rule in rules_of(target):
        for most_blocks in (6, 3, 2, 1):
            for grids in range(1, rule.blocks_per_sm + 1):
                yield attrs.evolve(rule, most_blocks=most_blocks, grids=grids)


def packed_copies(scheme: str, n: int, k: int) -> list[PackedMatrix]:
    """One random weight of the scheme, packed, as often as a graph rotates over."""
    request = KernelRequest(
        op="linear", scheme=scheme, activations="16bit", device="cuda", shape=(n, k), parts=(n,)
    )
    (weight,) = random_weights(request)
    if isinstance(weight, NVFP4Weight):
        nvfp4 = pack([weight])
        return [attrs.evolve(nvfp4, blocks=nvfp4.blocks.clone()) for _ in range(copies_of(nvfp4.nbytes))]
    if not isinstance(weight, FP8Weight | MXFP8Weight):
        raise SystemExit(f"no packed layout for {scheme}")
    fp8 = pack_fp8([weight])
    return [attrs.evolve(fp8, blocks=fp8.blocks.clone()) for _ in range(copies_of(fp8.nbytes))]


def bound(packed: PackedMatrix, form: StreamForm) -> StreamLinear:
    """The linear in that form, whatever number of tokens it is called with."""
    with patch.object(stream_launches, "choose_form", lambda *_: form):
        return StreamLinear(packed, torch.bfloat16)


def sweep(scheme: str, shape: str, tokens: list[int], until: float) -> None:
    """Prints the fastest forms of a shape for each number of tokens."""
    n, k = table.SHAPES[shape]
    copies = packed_copies(scheme, n, k)
    target = target_of(torch.cuda.get_device_capability())
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for m in tokens:
        x = torch.randn(m, k, device="cuda").bfloat16()
        wanted: Tensor | None = None
        times: list[tuple[float, str]] = []
        for place, form in enumerate(forms_to_try(n, k, m, count, target, copies[0].format.block_bytes)):
            if time.perf_counter() > until:
                break
            calls = [partial(bound(packed, form), x) for packed in copies]
            y = calls[0]()
            wanted = y if wanted is None else wanted
            if not torch.equal(y, wanted):
                print(f"{shape} M={m} WRONG {_told(form)}", flush=True)
                continue
            us = time_calls(calls, graph_us=1500.0, replays=5).median
            times.append((us, ("* " if place == 0 else "  ") + _told(form)))
        best = sorted(times)[:SHOWN]
        for us, told in [*best, *(one for one in times[:1] if one not in best)]:
            rate = copies[0].blocks.nbytes / us / 1e3
            print(f"{scheme} {shape} M={m} {us:7.2f} us {rate:5.0f} GB/s {told}", flush=True)


def _told(form: StreamForm) -> str:
    kind = (
        form.cluster,
        form.warps,
        form.reducers,
        form.blocks_per_sm,
        form.token_tiles,
        form.row_tiles,
    )
    return f"{kind} ring {form.stages}x{form.stage_blocks} slots {form.slots} grid {form.grid}"


def main() -> None:
    """Sweep what is asked for until the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", default="fp8-tensor")
    parser.add_argument("--shapes", default=",".join(table.SHAPES_27B))
    parser.add_argument("--tokens", default="1,8,16,32")
    parser.add_argument("--seconds", type=float, default=150.0)
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    until = time.perf_counter() + args.seconds
    for shape in args.shapes.split(","):
        sweep(args.scheme, shape, [int(word) for word in args.tokens.split(",")], until)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
