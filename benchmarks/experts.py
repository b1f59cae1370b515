"""Times of the grouped experts of a mixture on a CUDA device: gate_up and down of 40 layers, in one CUDA graph.

    python benchmarks/experts.py --json benchmarks/results/experts-h200.json

The shapes are those of the 35B: hidden 2048, 256 experts of width 512, 8 of them for a token, and a shared expert, all
as one call a layer. Every layer has weights of its own (18 GB together) and chooses experts of its own, evenly at
random. Bytes are those of the distinct experts that are read; the floor is the time to read as many, gate_up and down
one after the other, measured in the same run. The peer at one token: 0.91 ms over 40 layers, vLLM 0.26's Marlin MoE
(w13 and w2, without the shared expert).

--sweep tries forms and grids instead, and prints the fastest of each number of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
from cuda_device import require_cuda
from graph_timing import time_calls
from measured_on import measured_on
from read_ceiling import Reader
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_kernels.experts.form import MOST_PAIRS, ExpertsTuning, down_form, form_for
from vtensors_kernels.experts.launches import GroupedExperts
from vtensors_kernels.experts.packed import PackedExperts, pack_experts
from vtensors_kernels.experts.probe import probe_experts
from vtensors_kernels.random_weights import random_weights

HIDDEN, WIDTH, EXPERTS, TOP, LAYERS = 2048, 512, 256, 8, 40
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
# Of what is not NVFP4 without a shared expert.
FEWER_TOKENS = (1, 8, 16, 32, 2048)
# Layers that are timed where tokens are many: a graph of 40 would take long, and the cache is passed at once.
MANY_LAYERS = 8
# Pairs from which a batch has kernels of its own: of none.
NO_BATCH = MOST_PAIRS + 1
PEER = {"name": "vLLM 0.26 Marlin MoE", "tokens": 1, "ms_of_40_layers": 0.91}


def request_for(scheme: str, *, shared: bool) -> KernelRequest:
    """The op at the shapes of the 35B on the current device."""
    return KernelRequest(
        op="experts",
        scheme=scheme,
        activations="16bit",
        device=f"cuda:{torch.cuda.current_device()}",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        shape=(2 * WIDTH, HIDDEN),
        parts=(WIDTH, WIDTH, HIDDEN),
        traits=frozenset({"shared_expert"} if shared else ()),
        experts=EXPERTS,
        chosen=TOP,
    )


@attrs.frozen(kw_only=True)
class Layers:
    """packed: the weights of each layer, the same bytes at different addresses."""

    packed: tuple[PackedExperts, ...]

    @classmethod
    def make(cls, scheme: str, *, shared: bool, count: int = LAYERS) -> Layers:
        """Random weights, packed once and copied."""
        first = pack_experts(random_weights(request_for(scheme, shared=shared)), EXPERTS)
        copies = [
            attrs.evolve(
                first,
                gate_up=attrs.evolve(first.gate_up, blocks=first.gate_up.blocks.clone()),
                down=attrs.evolve(first.down, blocks=first.down.blocks.clone()),
            )
            for _ in range(count - 1)
        ]
        return cls(packed=(first, *copies))

    def bytes_read(self, experts: int) -> tuple[int, int]:
        """Of gate_up and of down for so many distinct experts."""
        one = self.packed[0]
        all_of_them = one.experts + one.shared
        return tuple(  # type: ignore[return-value]
            (m.blocks.nbytes + m.row_scale.nbytes) // all_of_them * experts for m in (one.gate_up, one.down)
        )


@attrs.frozen(kw_only=True)
class Inputs:
    """Activations of M tokens, and the choices of every layer."""

    x: Tensor
    gate: Tensor | None
    chosen: tuple[Tensor, ...]
    router: Tensor
    distinct: float

    @classmethod
    def make(cls, m: int, layers: int, *, shared: bool) -> Inputs:
        """Experts chosen evenly, different ones in every layer."""
        device = "cuda"
        chosen = tuple(
            torch.rand(m, EXPERTS, device=device).argsort(-1)[:, :TOP].to(torch.int32) for _ in range(layers)
        )
        return cls(
            x=torch.randn(m, HIDDEN, device=device).bfloat16(),
            gate=torch.randn(m, 1, device=device).bfloat16() if shared else None,
            chosen=chosen,
            router=torch.full((m, TOP), 1 / TOP, device=device),
            distinct=sum(len(one.unique()) for one in chosen) / layers,
        )


def timed(
    layers: Layers, given: Inputs, tuning: ExpertsTuning | None, graph_us: float, replays: int
) -> tuple[float, float, float]:
    """Median, lowest and highest microseconds of one layer."""
    calls = [GroupedExperts(packed, torch.bfloat16, tuning) for packed in layers.packed[: len(given.chosen)]]
    runs = [
        lambda call=call, chosen=chosen: call(given.x, chosen, given.router, given.gate, None, given.x)
        for call, chosen in zip(calls, given.chosen, strict=True)
    ]
    times = time_calls(runs, graph_us=graph_us, replays=replays)
    return times.median, times.low, times.high


def measure(
    layers: Layers, scheme: str, m: int, reader: Reader, *, shared: bool, graph_us: float, replays: int
) -> dict[str, Any]:
    """One row of the record."""
    count = LAYERS if m <= 32 else MANY_LAYERS
    given = Inputs.make(m, min(count, len(layers.packed)), shared=shared)
    median, low, high = timed(layers, given, None, graph_us, replays)
    sizes = [size // 16 * 16 for size in layers.bytes_read(round(given.distinct) + shared)]
    floors = [reader.floor(size, graph_us=graph_us / 4, replays=5) for size in sizes]
    floor = sum(one.us for one in floors)
    flops = 2 * m * (TOP + shared) * 3 * HIDDEN * WIDTH
    return {
        "scheme": scheme,
        "m": m,
        "shared_expert": shared,
        "distinct_experts": round(given.distinct, 1),
        "bytes": sum(sizes),
        "us": round(median, 3),
        "low_us": round(low, 3),
        "high_us": round(high, 3),
        "ms_of_40_layers": round(median * LAYERS / 1e3, 4),
        "gb_s": round(sum(sizes) / median / 1e3),
        "floor_us": round(floor, 3),
        "share_of_floor": round(floor / median, 4),
        "tflops": round(flops / median / 1e6, 1),
    }


def tunings(m: int) -> Iterator[tuple[str, ExpertsTuning]]:
    """What is tried for m tokens, with its name."""
    if m * TOP > MOST_PAIRS:
        for tokens, depth, blocks, tiles in product((2, 4), (1, 2), (1, 2), (2, 4)):
            forms = tuple(
                attrs.evolve(
                    form_for(k, 1152, many=True), token_tiles=tokens, depth=depth, blocks_per_sm=blocks
                )
                for k in (HIDDEN, WIDTH)
            )
            name = f"tokens {8 * tokens}, depth {depth}, blocks {blocks}, tiles {tiles} {2 * tiles}"
            yield name, ExpertsTuning(many=(forms[0], forms[1]), tiles=(tiles, 2 * tiles))
        return
    for (depth, blocks), up in product(((4, 2), (3, 3), (2, 4)), (1, 2, 3, 4, 6, 8)):
        first, second = (
            attrs.evolve(form_for(k, 1152, many=False), depth=depth, blocks_per_sm=blocks)
            for k in (HIDDEN, WIDTH)
        )
        name = f"depth {depth}, blocks {blocks}, tiles {up}"
        for units in (1, 2, 4) if m * TOP <= MOST_PAIRS // 2 else ():
            direct = attrs.evolve(down_form(WIDTH, 1152), units=units)
            yield (
                f"{name}, direct {units}",
                ExpertsTuning(
                    few=(first, None),
                    direct=direct,
                    tiles=(up, None),
                    direct_pairs=MOST_PAIRS,
                    batch_pairs=NO_BATCH,
                ),
            )
        for down in (4, 8, 16) if m >= 4 else ():
            few = first, second
            yield (
                f"{name} {down}, finish",
                ExpertsTuning(few=few, tiles=(up, down), direct_pairs=0, batch_pairs=NO_BATCH),
            )


def sweep(layers: Layers, tokens: Sequence[int], *, shared: bool) -> None:
    """The fastest of the tunings of each number of tokens."""
    for m in tokens:
        count = LAYERS if m <= 32 else MANY_LAYERS
        given = Inputs.make(m, min(count, len(layers.packed)), shared=shared)
        found = []
        for name, tuning in tunings(m):
            try:
                found.append((timed(layers, given, tuning, 1000.0, 5)[0], name))
            except VtensorsError as problem:
                print(f"M={m} {name}: {problem}", flush=True)
        for us, name in sorted(found)[:6]:
            print(f"M={m} {us:.2f} us: {name}", flush=True)


def main() -> int:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    parser.add_argument("--schemes", default="nvfp4,fp8-tensor")
    parser.add_argument("--tokens", help="Numbers, with commas between.")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    asked = [int(word) for word in args.tokens.split(",")] if args.tokens else None
    record: dict[str, Any] = {**measured_on(args.commit), "peer": PEER, "rows": []}
    reader = Reader.make(600_000_000, torch.cuda.current_device())
    for scheme, shared in product(args.schemes.split(","), (True,) if args.sweep else (False, True)):
        probe_experts(request_for(scheme, shared=shared))
        layers = Layers.make(scheme, shared=shared)
        tokens = asked or (TOKENS if scheme == "nvfp4" and not shared else FEWER_TOKENS)
        if args.sweep:
            sweep(layers, tokens, shared=shared)
        for m in tokens if not args.sweep else ():
            row = measure(layers, scheme, m, reader, shared=shared, graph_us=3000.0, replays=11)
            record["rows"].append(row)
            print(
                f"{scheme} M={m}{' with the shared expert' if shared else ''}: {row['us']:.2f} us a layer, "
                f"{row['ms_of_40_layers']:.3f} ms of 40, {row['gb_s']} GB/s, {row['share_of_floor']:.0%} of the floor, "
                f"{row['tflops']} TFLOP/s, {row['distinct_experts']} experts",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        del layers
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
