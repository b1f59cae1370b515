"""Times of the gated delta net kernels on a CUDA device: a step of B sequences, and a prompt of T tokens.

    python benchmarks/gated_delta_net.py --json benchmarks/results/gated-delta-net-h200.json
    python benchmarks/gated_delta_net.py --sweep

A time is the median of replays of a CUDA graph that rotates over at least 400 MB of states. A step must read and
write its states: its floor is that many bytes at the bandwidth of torch's in-place multiplication of 1 GB in the same
run, and beside it stands the time of such a multiplication of the states. Each kernel is first held against the
reference.
--sweep also times the prompt with other numbers of columns of a lane and a block.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from cuda_device import require_cuda
from graph_timing import Call, copies_of, time_calls
from measured_on import measured_on
from torch import Tensor

from vtensors_kernels.steps.gated_delta_form import PREFILL_COLUMNS, PREFILL_SPAN
from vtensors_kernels.steps.gated_delta_net import PIECE, GatedDeltaNetKernel
from vtensors_kernels.steps.gated_delta_probe import probe_gated_delta_net

# Key heads, value heads.
MODELS = {"27B": (16, 48), "35B-A3B": (16, 32)}
DIM, TAPS, EPS = 128, 4, 1e-6
ROWS, TOKENS = (1, 2, 4, 8, 16, 32), (16, 128, 512, 2048)
SWEPT = ((1, 16), (1, 32), (2, 16), (2, 32), (2, 64), (4, 16), (4, 32), (4, 64), (4, 128))
PEAK_BYTES = 2_000_000_000
GRAPH_US, REPLAYS = 3000.0, 15


@attrs.frozen(kw_only=True)
class States:
    """Slots enough to pass the L2 cache, all at position 9."""

    history: Tensor
    memory: Tensor

    @classmethod
    def make(cls, kernel: GatedDeltaNetKernel, slots: int) -> States:
        """Random states."""
        form = kernel.form
        history = torch.randn(slots, form.taps, form.channels, device=kernel.device).to(kernel.dtype)
        memory = torch.randn(slots, form.value_heads, form.key_dim, form.value_dim, device=kernel.device)
        return cls(history=history, memory=memory)


def make_kernel(key_heads: int, value_heads: int, columns: tuple[int, int]) -> GatedDeltaNetKernel:
    """Bound to random weights."""
    generator = torch.Generator().manual_seed(0)
    channels = 2 * key_heads * DIM + value_heads * DIM
    return GatedDeltaNetKernel(
        key_heads=key_heads,
        value_heads=value_heads,
        conv=(torch.randn(channels, TAPS, generator=generator) / 2).cuda(),
        decay=-torch.linspace(0.01, 4, value_heads).cuda(),
        dt_bias=torch.randn(value_heads, generator=generator).cuda(),
        norm=(torch.rand(DIM, generator=generator) + 0.5).cuda(),
        eps=EPS,
        dtype=torch.bfloat16,
        prefill_columns=columns,
    )


def make_inputs(kernel: GatedDeltaNetKernel, rows: int) -> tuple[Tensor, ...]:
    """qkv, z as columns of one matrix, and b, a of another, as the projections give them."""
    form = kernel.form
    wide = torch.randn(rows, form.channels + form.value_width, device="cuda").to(kernel.dtype)
    narrow = torch.randn(rows, 2 * form.value_heads, device="cuda").to(kernel.dtype)
    return (
        *wide.split_with_sizes((form.channels, form.value_width), dim=1),
        *narrow.split_with_sizes((form.value_heads, form.value_heads), dim=1),
    )


def _us(calls: Sequence[Call]) -> dict[str, float]:
    times = time_calls(calls, graph_us=GRAPH_US, replays=REPLAYS)
    return {"us": round(times.median, 3), "low_us": round(times.low, 3), "high_us": round(times.high, 3)}


def _multiplied(pool: Tensor) -> Call:
    return lambda: pool.mul_(1.0)


def time_steps(kernel: GatedDeltaNetKernel, model: str, gb_s: float) -> list[dict[str, Any]]:
    """A row for each B."""
    found = []
    for rows in ROWS:
        nbytes = 2 * rows * kernel.form.value_heads * DIM * DIM * 4
        copies = copies_of(nbytes // 2)
        states, inputs = States.make(kernel, copies * rows), make_inputs(kernel, rows)
        positions = torch.full((rows,), 9, dtype=torch.int32, device="cuda")
        slots = torch.arange(copies * rows, dtype=torch.int32, device="cuda").view(copies, rows)
        calls = [
            partial(kernel.decode, *inputs, states.history, states.memory, slots[i], positions)
            for i in range(copies)
        ]
        row = {"model": model, "what": "step", "rows": rows, **_us(calls), "bytes": nbytes}
        pieces = states.memory.view(copies, rows, *states.memory.shape[1:])
        multiplied = _us([_multiplied(pieces[i]) for i in range(copies)])["us"]
        floor = nbytes / gb_s / 1e3
        row |= {"gb_s": round(nbytes / row["us"] / 1e3), "floor_us": round(floor, 3)}
        row |= {"share_of_floor": round(floor / row["us"], 3), "torch_mul_us": multiplied}
        found.append(row)
        print(
            f"{model} step of {rows:2d}: {row['us']:7.2f} us ({row['low_us']:.2f} .. {row['high_us']:.2f}), "
            f"{row['gb_s']} GB/s, {row['share_of_floor']:.0%} of the floor of {floor:.2f} us; "
            f"torch mul_ of the states {multiplied:.2f} us",
            flush=True,
        )
    return found


def time_prompts(
    kernel: GatedDeltaNetKernel, model: str, tokens: Sequence[int], *, parts: bool
) -> list[dict[str, Any]]:
    """A row for each T; with parts the three kernels by themselves too."""
    found = []
    states = States.make(kernel, 4)
    positions = torch.full((1,), 9, dtype=torch.int32, device="cuda")
    slots = torch.arange(4, dtype=torch.int32, device="cuda")
    for count in tokens:
        inputs = [make_inputs(kernel, count) for _ in range(2)]
        calls = [
            partial(
                kernel.prefill, *inputs[i % 2], states.history, states.memory, slots[i : i + 1], positions
            )
            for i in range(4)
        ]
        row = {"model": model, "what": "prompt", "tokens": count, **_us(calls)}
        row |= {"columns": [kernel.form.columns, kernel.form.span]}
        row |= {"us_per_token": round(row["us"] / count, 4)}
        text = ""
        if parts and count <= PIECE:
            row["parts_us"] = _parts(kernel, inputs[0], states, slots[:1], positions)
            text = ", ".join(f"{name} {us:.1f} us" for name, us in row["parts_us"].items())
        found.append(row)
        print(
            f"{model} prompt of {count:4d}, columns {kernel.form.columns} of {kernel.form.span}: "
            f"{row['us']:8.1f} us, {row['us_per_token']:.3f} us a token; {text}",
            flush=True,
        )
    return found


def _parts(
    kernel: GatedDeltaNetKernel, inputs: tuple[Tensor, ...], states: States, slot: Tensor, positions: Tensor
) -> dict[str, float]:
    form, count = kernel.form, inputs[0].shape[0]
    qkv, z, b, a = inputs
    out = qkv.new_empty(count, form.value_width)
    scratch = kernel.scratch(count)
    launches = kernel.piece(
        (qkv, z, b, a), (states.history, states.memory), (slot, positions), out, scratch, 0
    )
    return {
        launch.function.removeprefix("gated_delta_"): _us([partial(kernel.launch, launch, arguments)])["us"]
        for launch, arguments in launches
    }


def main() -> int:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    record: dict[str, Any] = {
        **measured_on(args.commit),
        "method": {"graph_us": GRAPH_US, "replays": REPLAYS},
    }
    pool = torch.ones(PEAK_BYTES // 8, device="cuda")
    peak_us = _us([_multiplied(pool)])["us"]
    gb_s = 2 * pool.nbytes / peak_us / 1e3
    record["read_and_write_gb_s"] = round(gb_s)
    print(
        f"{record['gpu']}: torch mul_ of {pool.nbytes / 1e9:.1f} GB in place moves {gb_s:.0f} GB/s",
        flush=True,
    )
    del pool
    rows: list[dict[str, Any]] = []
    for model, heads in MODELS.items():
        kernel = make_kernel(*heads, (PREFILL_COLUMNS, PREFILL_SPAN))
        probe_gated_delta_net(kernel)
        rows += time_steps(kernel, model, gb_s)
        rows += time_prompts(kernel, model, TOKENS, parts=True)
        for columns in SWEPT if args.sweep else ():
            rows += time_prompts(make_kernel(*heads, columns), model, (512,), parts=True)
    if args.json is not None:
        head = json.dumps(record, indent=1)[:-2]
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
