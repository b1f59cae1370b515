"""Times of one layer's decode attention over a paged cache beside the time that reading its bytes takes.

    python benchmarks/paged_attention.py --json benchmarks/results/paged-attention-h200.json
    python benchmarks/paged_attention.py --shapes qwen3.6-27b --rows 1,32 --contexts 1024 --blocks 264,528,1024,2048
    python benchmarks/paged_attention.py --shapes qwen3.6-27b --caches bf16 --kernels chosen,paged_attention_decode

A time is the median of replays of a CUDA graph over copies of the cache of at least 400 MB together; a call has both
launches, norms, rotation, the write to the cache and the gate. Between them nothing is written but results: an L2 cache
that is emptied by writing is full of lines which the next call's reads must first write back, and a call of 20 us takes
50. Each is first held against the reference, and another kernel's result against the chosen one's bits. The floor is
keys and values once, at 4.3 TB/s, what plain loads reach on an H200 (`linear.py` measures it).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
from cuda_device import require_cuda
from graph_timing import copies_of, time_calls
from measured_on import measured_on
from torch import Tensor

from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.paged_attention import AttentionShape
from vtensors_kernels.steps.paged_attention import FINE_TOKENS, PagedAttention, splits_of
from vtensors_kernels.steps.paged_attention_forms import decode_form
from vtensors_kernels.steps.paged_attention_probe import (
    DECODE_LIMITS,
    PagedCase,
    probe_paged_attention,
    relative_errors,
)

# Heads, heads of keys and values, D, turned dimensions, gated.
SHAPES = {
    "qwen3.6-27b": (24, 4, 256, 64, True),
    "qwen3.6-35b-a3b": (16, 2, 256, 64, True),
    "llama-8b": (32, 8, 128, 128, False),
}
ROWS, CONTEXTS = (1, 8, 32), (128, 1024, 8192)
CHOSEN, DECODE = "chosen", "paged_attention_decode"
FLOOR_BYTES_PER_US = 4.3e6


def make_attention(
    name: str,
    scales: tuple[float, float] | None,
    kernel: str = CHOSEN,
    blocks: int | None = None,
    fine_tokens: int = FINE_TOKENS,
) -> tuple[AttentionShape, PagedAttention]:
    """The shape of that name and its kernel, as Point says."""
    heads, kv_heads, dim, rotary, gated = SHAPES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    gains = [torch.linspace(0.5, 1.5, dim, device=device) for _ in range(2)]
    shape = AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary,
        gated=gated,
        q_gain=gains[0] if gated else None,
        k_gain=gains[1] if gated else None,
        eps=1e-6,
        scale=dim**-0.5,
        dtype=torch.bfloat16,
        kv_scales=scales,
    )
    attention = PagedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary,
        gated=gated,
        q_gain=shape.q_gain,
        k_gain=shape.k_gain,
        eps=shape.eps,
        scale=shape.scale,
        dtype=shape.dtype,
        kv_scales=scales,
        max_positions=max(CONTEXTS) + 64,
        form=decode_form(dtype_defines(shape.dtype), dim, scales is not None) if kernel == DECODE else None,
        blocks=blocks,
        fine_tokens=fine_tokens,
    )
    return shape, attention


@attrs.frozen(kw_only=True)
class Point:
    """What one row of the record is about. fp8: the cache. kernel: CHOSEN or DECODE. Others: see PagedAttention."""

    shape: str
    fp8: bool
    rows: int
    context: int
    kernel: str
    blocks: int | None
    fine_tokens: int


def measure(point: Point, *, graph_us: float, replays: int) -> dict[str, Any]:
    """One row. Raises ValueError where the result is wrong."""
    rows, context = point.rows, point.context
    scales = (0.25, 0.5) if point.fp8 else None
    shape, attention = make_attention(point.shape, scales, point.kernel, point.blocks, point.fine_tokens)
    small = PagedCase.make(shape, (context - 1,), attention.device)
    found = small.decode(attention)
    error = relative_errors(found, small.wanted())["result"]
    if not error < DECODE_LIMITS[shape.dtype]:
        raise ValueError(f"relative error {error:.1e}")
    _, other = make_attention(point.shape, scales, fine_tokens=point.fine_tokens)
    if not torch.equal(small.decode(other)[0], found[0]):
        raise ValueError("other bits than the chosen kernel's")
    calls, nbytes = _calls(shape, attention, small, rows, context)
    times = time_calls(calls, graph_us=graph_us, replays=replays)
    if not isinstance(times.last, Tensor) or not torch.isfinite(times.last).all():
        raise ValueError("a result is not finite")
    floor = nbytes / FLOOR_BYTES_PER_US
    return {
        **attrs.asdict(point),
        "kernel": attention.form.function,
        "splits": splits_of(context, point.fine_tokens),
        "us": round(times.median, 3),
        "low_us": round(times.low, 3),
        "high_us": round(times.high, 3),
        "bytes": nbytes,
        "gb_s": round(nbytes / times.median / 1e3),
        "floor_us": round(floor, 3),
        "share_of_floor": round(floor / times.median, 4),
        "relative_error": round(error, 6),
    }


def _calls(
    shape: AttentionShape, attention: PagedAttention, small: PagedCase, rows: int, context: int
) -> tuple[list[Callable[[], Tensor]], int]:
    """Calls over caches of their own, and the bytes of keys and values that one reads."""
    pages, device = -(-context // 64), attention.device
    page_bytes = shape.kv_heads * 64 * shape.head_dim * small.k_pages.element_size()
    copies = copies_of(2 * rows * pages * page_bytes)
    widths = [small.q.shape[1], small.k.shape[1], small.v.shape[1]]
    projected = torch.randn(rows, sum(widths), device=device).to(shape.dtype)
    q, k, v = torch.split(projected, widths, dim=1)
    positions = torch.full((rows,), context - 1, dtype=torch.int32, device=device)
    # Each row reads a page of `small` again and again, by copies of its own.
    source = small.page_table[0].long().repeat(rows)
    calls: list[Callable[[], Tensor]] = []
    for _ in range(copies):
        order = torch.randperm(rows * pages, device=device).to(torch.int32)
        back = torch.argsort(order).to(torch.int32).view(rows, pages)
        keys, values = (_copied(cache, source[order.long()]) for cache in (small.k_pages, small.v_pages))
        calls.append(partial(attention.decode, q, k, v, keys, values, back, positions, small.cos_sin))
    return calls, 2 * rows * context * shape.kv_heads * shape.head_dim * small.k_pages.element_size()


def _copied(cache: Tensor, pages: Tensor) -> Tensor:
    flat = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return flat[pages].view(cache.dtype)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| shape | FP8 | rows | context | kernel | blocks | fine | us | floor us | share | GB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        names = ("shape", "fp8", "rows", "context", "kernel", "blocks", "fine_tokens", "us", "floor_us")
        cells = [str(row[name]) for name in names]
        lines.append("| " + " | ".join([*cells, f"{row['share_of_floor']:.0%}", str(row["gb_s"])]) + " |")
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    """Measure, print the table, and write the record; 1 where something that was asked for has no row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", type=_numbers, default=list(ROWS))
    parser.add_argument("--contexts", type=_numbers, default=list(CONTEXTS))
    parser.add_argument("--caches", default="bf16,fp8")
    parser.add_argument("--kernels", default=CHOSEN, help=f"{CHOSEN}, {DECODE} or both, with a comma.")
    parser.add_argument("--blocks", type=_numbers, default=[None], help="Several are compared.")
    parser.add_argument(
        "--fine", type=_numbers, default=[FINE_TOKENS], help="Likewise: up to so many, one page."
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    parser.add_argument("--quick", action="store_true", help="Shorter graphs, fewer replays.")
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    graph_us, replays = (1000.0, 7) if args.quick else (3000.0, 15)
    record: dict[str, Any] = {
        **measured_on(args.commit),
        "method": {"graph_us": graph_us, "replays": replays, "floor_gb_s": FLOOR_BYTES_PER_US / 1e3},
        "rows": [],
        "failures": [],
    }
    caches = [word == "fp8" for word in args.caches.split(",")]
    for name, fp8 in product(args.shapes.split(","), caches):
        probe_paged_attention(make_attention(name, (0.25, 0.5) if fp8 else None)[1])
    sizes = product(args.shapes.split(","), caches, args.rows, args.contexts)
    for (name, fp8, rows, context), kernel, blocks, fine_tokens in product(
        sizes, args.kernels.split(","), args.blocks, args.fine
    ):
        point = Point(
            shape=name,
            fp8=fp8,
            rows=rows,
            context=context,
            kernel=kernel,
            blocks=blocks,
            fine_tokens=fine_tokens,
        )
        try:
            row = measure(point, graph_us=graph_us, replays=replays)
        except (ValueError, torch.OutOfMemoryError) as problem:
            record["failures"].append({**attrs.asdict(point), "reason": str(problem)})
            print(f"{point}: {problem}", file=sys.stderr, flush=True)
            continue
        record["rows"].append(row)
        print(f"{point}: {row['us']:.2f} us, {row['share_of_floor']:.0%}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    print(_table(record["rows"]))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        lists = {key: record.pop(key) for key in ("rows", "failures")}
        fields = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
        for key, entries in lists.items():
            body = ",\n  ".join(json.dumps(entry) for entry in entries)
            fields.append(f" {json.dumps(key)}: [\n  {body}\n ]" if entries else f" {json.dumps(key)}: []")
        args.json.write_text("{\n" + ",\n".join(fields) + "\n}\n")
        record.update(lists)
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
