"""Forms of `linear_nvfp4_wgmma` on an H200: each checked, then timed; what `nvfp4/wgmma_form.py` is tuned by.

    python benchmarks/wgmma_sweep.py [--seconds 95] [--shapes gate_up,down] [--json FILE]

--json writes the table that the tests compare the choice with (benchmarks/results/wgmma-forms-h200.json).
A worker process prints; where it fails or hangs another goes on with the next shape. Times are medians of CUDA
graphs that rotate over more than 300 MB of weights. `*` marks the form that is shipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import torch
from cuda_device import require_cuda
from torch import Tensor

from vtensors_formats import NVFP4Weight
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.wgmma import LINEAR, WgmmaLinear, WgmmaWorkspace
from vtensors_kernels.nvfp4.wgmma_form import WgmmaForm, candidates, choose_form, modelled_time, width_of
from vtensors_kernels.reference.nvfp4_packing import unpack_reference

# (N, K), Marlin's microseconds at M = 64 on the same device (vLLM 0.26) where they were measured.
SHAPES = {
    "gate_up": (34816, 5120, 78.8),
    "down": (5120, 17408, 55.5),
    "in_qkvz": (16384, 5120, 44.4),
    "attn_qkv": (14336, 5120, 39.9),
    "o_out": (5120, 6144, 26.6),
    "lm_head": (248320, 5120, 488.0),
    "moe_qkvz": (12288, 2048, 0.0),
    "moe_out": (2048, 4096, 0.0),
    "shared_up": (1024, 2048, 0.0),
    "shared_down": (2048, 512, 0.0),
}
TOKENS = (64, 48, 32, 16)
ROTATED, SILENCE = 300e6, 40.0
COLUMNS = ["shape", "tokens", "warpgroups", "cluster", "blocks", "chunk", "slots", "depth", "group", "us"]
_LINE = re.compile(
    r"(\w+) +M=(\d+) wg(\d+) cluster(\d+) blocks(\d+) ring(\d+)x(\d+) stages\d+ depth(\d+)/(\d+)[ *]+([\d.]+) us"
)


def microseconds(calls: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Median time of one call."""
    rounds = max(1, 40 // len(calls))
    for call in calls[:2]:
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (*calls,) * rounds:
            call(x)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(9):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return float(statistics.median(times[2:]))


def weight(n: int, k: int) -> PackedNVFP4:
    """Random codes and scales, made on the device."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(8, 120, (n, k // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    size = torch.tensor(1.0 / (250.0 * k**0.5), device="cuda")
    return pack([NVFP4Weight(codes=codes, block_scale=scales, global_scale=size)])


def reference(packed: PackedNVFP4, x: Tensor) -> Tensor:
    """float32 [M, N], a few thousand rows of the weight at a time."""
    parts = []
    for first in range(0, packed.blocks.shape[0], 512):
        rows = packed.row_scale[16 * first : 16 * (first + 512)]
        shape = (min(packed.shape[0] - 16 * first, 8192), packed.shape[1])
        blocks = packed.blocks[first : first + 512]
        parts.append(x.float() @ unpack_reference(PackedNVFP4(blocks=blocks, row_scale=rows, shape=shape)).T)
    return torch.cat(parts, dim=-1)


def forms_of(n: int, k: int, tokens: int) -> list[WgmmaForm]:
    """The shipped form, the best by the model, and other rings and depths of the shipped one."""
    width, count = width_of(tokens), torch.cuda.get_device_properties(0).multi_processor_count
    chosen = choose_form(n, k, width, count)
    ranked = sorted(candidates(n, k, width, count), key=lambda form: modelled_time(n, k, form))
    best = {(form.warpgroups, form.cluster): form for form in reversed(ranked)}
    rings = {4: [(2, 4), (2, 2)], 3: [(2, 5), (2, 3)], 2: [(2, 6), (2, 4)]}[chosen.warpgroups]
    variants = [attrs.evolve(chosen, chunk=chunk, slots=slots) for chunk, slots in rings]
    variants.append(attrs.evolve(chosen, depth=2, group=3 - chosen.group))
    variants.append(attrs.evolve(chosen, cluster=1, blocks=count).fitted(n, k))
    if tokens not in (64, 48):
        variants = []
    return list(dict.fromkeys([chosen, *best.values(), *ranked[:4], *variants]))


def explain(form: WgmmaForm) -> None:
    """Which column of the weight each of 128 unit activations met, for a small matrix."""
    packed = weight(64, 128)
    dense = unpack_reference(packed)
    linear = WgmmaLinear(packed, torch.bfloat16, tokens=(form.tokens, form.tokens), forms=(form,))
    seen = []
    for first in range(0, 128, form.tokens):
        unit = torch.zeros(form.tokens, 128, dtype=torch.bfloat16, device="cuda")
        for token in range(min(form.tokens, 128 - first)):
            unit[token, first + token] = 1
        for row in linear(unit).float()[: 128 - first]:
            distance = (dense - row[:, None]).norm(dim=0) / dense.norm(dim=0)
            seen.append(f"{int(distance.argmin())}({float(distance.min()):.2f})")
    print("  diagnosis: column met by unit column 0..127 (distance):", " ".join(seen), flush=True)


def work(names: list[str]) -> None:
    """Everything for these shapes, printed."""
    workspace = WgmmaWorkspace(device=torch.device("cuda", 0))
    wanted_forms = [form for name in names for m in TOKENS for form in forms_of(*SHAPES[name][:2], m)]
    begin = time.monotonic()
    compile_many(
        [
            Wanted(
                source=LINEAR,
                name="linear_nvfp4_wgmma",
                defines=tuple({**form.defines, "VT_F16": 0, "VT_EPILOGUE": 0}.items()),
                shared_bytes=form.shared_bytes,
            )
            for form in wanted_forms
        ],
        0,
    )
    print(f"compiled in {time.monotonic() - begin:.1f} s", flush=True)
    for name in names:
        n, k, marlin = SHAPES[name]
        packed = weight(n, k)
        copies = [packed] + [
            attrs.evolve(packed, blocks=packed.blocks.clone())
            for _ in range(max(1, int(ROTATED // packed.blocks.nbytes)))
        ]
        print(f"@ {name}", flush=True)
        wanted = reference(packed, torch.randn(64, k, device="cuda", generator=_seed()).bfloat16())
        for tokens in TOKENS:
            x = torch.randn(64, k, device="cuda", generator=_seed()).bfloat16()[:tokens].contiguous()
            for index, form in enumerate(forms_of(n, k, tokens)):
                _one(name, tokens, form, index == 0, copies, x, wanted[:tokens], workspace, marlin)
        del copies, packed


def _one(
    name: str,
    tokens: int,
    form: WgmmaForm,
    shipped: bool,
    copies: list[PackedNVFP4],
    x: Tensor,
    wanted: Tensor,
    workspace: WgmmaWorkspace,
    marlin: float,
) -> None:
    what = f"wg{form.warpgroups} cluster{form.cluster} blocks{form.blocks} ring{form.chunk}x{form.slots}"
    what = f"{name:11s} M={tokens:2d} {what} stages{form.stages} depth{form.depth}/{form.group}"
    what += " *" if shipped else ""
    n, k = copies[0].shape
    try:
        linears = [
            WgmmaLinear(packed, torch.bfloat16, tokens=(tokens, tokens), workspace=workspace, forms=(form,))
            for packed in copies
        ]
        workspace.poison()
        first, again = linears[0](x), linears[0](x)
        torch.cuda.synchronize()
        error = float((first.float() - wanted).norm() / wanted.norm())
        if not error < 4e-3 or not torch.equal(first, again):
            print(f"{what}  WRONG {error:.2e}, repeats {torch.equal(first, again)}", flush=True)
            if shipped and tokens == 64:
                explain(form)
            return
        us = microseconds(linears, x)
        floor, model = copies[0].blocks.nbytes / 4.6e6, modelled_time(n, k, form)
        ratio = f"marlin x{marlin / us:.2f}" if marlin and tokens == 64 else ""
        print(
            f"{what}  {us:7.2f} us  {floor / us:4.0%} of bytes, model {model:6.1f}, error {error:.1e} {ratio}",
            flush=True,
        )
    except Exception as problem:
        print(f"{what}  FAILED {type(problem).__name__}: {problem}", flush=True)
        if "CUDA" in str(problem) or "launch" in str(problem).lower():
            traceback.print_exc()
            os._exit(3)  # the context is lost


def _seed() -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(1)


def main() -> None:
    """Run workers until every shape is done or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    require_cuda("sm_90a")
    names = options.shapes.split(",")
    if options.worker:
        work(names)
        return
    rows: list[list[object]] = []
    for line in supervise(__file__, names, options.seconds):
        print(line, end="", flush=True)
        if row := _LINE.match(line):
            rows.append([int(value) if value.isdigit() else value for value in row.groups()[:-1]])
            rows[-1].append(float(row[row.lastindex or 0]))
    if options.json:
        options.json.write_text(_table(rows), encoding="utf-8")


def supervise(script: str, names: list[str], seconds: float, more: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines of `script --worker --shapes names`, started again behind the shape where it fails or falls silent."""
    stop = time.monotonic() + seconds
    while names and time.monotonic() < stop:
        command = [sys.executable, script, "--worker", "--shapes", ",".join(names), *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        begun = -1
        for _ in itertools.count():
            try:
                line = lines.get(timeout=max(0.1, min(SILENCE, stop - time.monotonic())))
            except queue.Empty:
                yield "  silence or time is up: the worker is stopped\n"
                break
            if line is None:
                break
            if line.startswith("@ "):
                begun = names.index(line[2:].strip())
            yield line
        process.kill()
        code = process.wait()
        names = [] if code == 0 else names[max(begun, 0) + 1 :]


def _table(rows: list[list[object]]) -> str:
    """The table as JSON, one form a line."""
    shapes = {name: [n, k] for name, (n, k, _) in SHAPES.items()}
    head = {
        "gpu": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "shapes": shapes,
        "columns": COLUMNS,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join("  " + json.dumps(row) for row in rows)
    return "\n".join(["{", *lines, ' "rows": [', body, " ]", "}", ""])


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    main()
