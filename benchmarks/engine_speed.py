"""Whole-model speed of the CUDA engine: load, prefill, and greedy decode at several numbers of sequences.

    python benchmarks/synthetic.py qwen3.6-27b --out DIR
    python benchmarks/engine_speed.py DIR --json benchmarks/results/engine-27b-h200.json

Prompts are random token ids; every sequence runs to its last token. Decode speed counts the tokens between the moment
when everyone has their first token and the last step. `read_gb_s` is what the device reads in the same run, for the
floor of a step: the bytes of the weights that it reads over that.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from cuda_device import require_cuda
from measured_on import measured_on
from read_ceiling import Reader

import vtensors
from vtensors_engine.cuda.runner import CudaRunner
from vtensors_engine.runner import Row
from vtensors_kernels.compiling.architectures import target_of


@attrs.frozen(kw_only=True)
class Decoded:
    """One number of sequences. step_ms: median of a step; tokens_per_second: of all sequences together."""

    sequences: int
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    step_ms: float
    tokens_per_second: float
    finite: bool


def peak_rss() -> int:
    """Bytes, the most that this process has had in memory."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


def decode(runner: CudaRunner, vocab: int, sequences: int, prompt: int, new: int) -> Decoded:
    """Greedy tokens of so many random prompts at a time."""
    generator = torch.Generator().manual_seed(sequences)
    prompts = torch.randint(0, vocab, (sequences, prompt), generator=generator).tolist()
    handles = [runner.admit(tuple(ids), new) for ids in prompts]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for handle in handles:
        if handle is None:
            raise SystemExit(f"the caches have no room for {sequences} sequences of {prompt + new} tokens")
        while (step := runner.prefill(handle)) is None:
            pass
        step.tokens()
    prefill_seconds = time.perf_counter() - begin
    rows = [Row(handle, None) for handle in handles if handle is not None]
    # The graph is recorded outside of what is timed.
    runner.decode(rows).tokens()
    times, finite, waiting = [], True, []
    torch.cuda.synchronize()
    begin = last = time.perf_counter()
    for _ in range(new - 2):
        waiting.append(runner.decode(rows))
        if len(waiting) > runner.ahead:
            waiting.pop(0).tokens()
            now = time.perf_counter()
            times.append(now - last)
            last = now
    for step in waiting:
        step.tokens()
        finite = finite and not step.failures()
    seconds = time.perf_counter() - begin
    for row in rows:
        runner.release(row.handle)
    return Decoded(
        sequences=sequences,
        prompt_tokens=prompt,
        new_tokens=new,
        prefill_seconds=round(prefill_seconds, 4),
        step_ms=round(statistics.median(times) * 1e3, 4),
        tokens_per_second=round(sequences * (new - 2) / seconds, 1),
        finite=finite,
    )


def weight_bytes(model: Any) -> dict[str, int]:
    """Bytes on the device: of the prepared weights together, and what the embeddings and experts have of it."""
    prepared = sum(record.prepared_bytes for record in model.selected)
    experts = sum(record.prepared_bytes for record in model.selected if ".experts." in record.module)
    return {"prepared": prepared, "experts": experts}


def kernels_of(model: Any) -> dict[str, int]:
    """Kernel -> number of modules, over all numbers of rows."""
    found: Counter[str] = Counter()
    for record in model.selected:
        own = {name for _, _, name in record.kernels} or {record.kernel}
        found.update(own if record.merged is None else {*own, record.merged[2]})
    return dict(sorted(found.items()))


def main() -> None:
    """Load, decode, print a line each, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--activations", default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    args = parser.parse_args()
    require_cuda()
    counts = [int(text) for text in args.sequences.split(",")]
    base = peak_rss()
    begin = time.perf_counter()
    model = vtensors.load_model(
        args.path, device="cuda", activations=args.activations, kv_cache_dtype=args.kv_cache_dtype
    )
    torch.cuda.synchronize()
    loaded, loaded_rss = time.perf_counter() - begin, peak_rss()
    tokens = max(counts) * (args.prompt + args.new + 64)
    runner = CudaRunner(model, max_sequences=max(counts), max_tokens=tokens)
    print(
        f"loaded in {loaded:.1f} s, peak RSS {loaded_rss / 1e9:.2f} GB ({base / 1e9:.2f} before)", flush=True
    )
    found = []
    for count in counts:
        found.append(decode(runner, model.vocab_size, count, args.prompt, args.new))
        print(json.dumps(attrs.asdict(found[-1])), flush=True)
    record = {
        **measured_on(args.commit),
        "target": target_of(torch.cuda.get_device_capability()),
        "checkpoint": Path(model.provenance.source).name,
        "commit_of_checkpoint": model.provenance.commit,
        "headers": {shard.file: shard.header_sha256 for shard in model.provenance.shards},
        "executed": model.executed_summary(),
        "kv_cache": model.kv_cache,
        "kernels": kernels_of(model),
        "weights": weight_bytes(model),
        "load_seconds": round(loaded, 2),
        "peak_rss_bytes": {"before": base, "loaded": loaded_rss, "end": peak_rss()},
        "gpu_bytes": torch.cuda.max_memory_allocated(),
        "read_gb_s": round(Reader.make(1 << 30).floor(1 << 30, graph_us=3000, replays=5).gb_s, 1),
        "decode": [attrs.asdict(one) for one in found],
    }
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
