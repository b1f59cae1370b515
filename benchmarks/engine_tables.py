"""The tables of docs/performance.md and docs/accuracy.md that whole models give, made from the committed records.

python benchmarks/engine_tables.py            rewrites both pages
python benchmarks/engine_tables.py --check    exits 1 if that would change one
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rounding_table import rounding_text

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
Record = Mapping[str, Any]
Text = Callable[[Path], str]
# vLLM 0.26.0 on an H200 with the same synthetic weights: greedy, 1,024 random prompt ids, 128 tokens, CUDA graphs and
# torch.compile, medians of 3: sequences -> tokens a second.
VLLM = {
    "qwen3.6-27b": {1: 107.9, 8: 786.8, 32: 2230.5},
    "qwen3.6-35b-a3b": {1: 258.1, 8: 1485.6, 32: 3368.6},
}
# Bytes of weights that a step of one sequence reads (shapes and formats of the checkpoints): its floor, with the
# device's read bandwidth.
READ_BYTES = {"qwen3.6-27b": 17.61e9, "qwen3.6-35b-a3b": 2.25e9}


def engine_text(folder: Path) -> str:
    """Load, prompts and decoding of every engine record in the folder."""
    parts = []
    for path in sorted(folder.glob("engine-*-h200.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        parts += [_engine_head(path.name, record), _decode_table(record)]
    return "\n\n".join(parts)


def _engine_head(name: str, record: Record) -> str:
    rss, decoded = record["peak_rss_bytes"], record["decode"]
    prompt = decoded[0]["prompt_tokens"] * decoded[-1]["sequences"] / decoded[-1]["prefill_seconds"]
    return (
        f"### {record['checkpoint']}\n\n"
        f"`benchmarks/results/{name}`: {record['gpu']}, driver {record['driver']}, {record['toolkit']}, torch "
        f"{record['versions']['torch']}, vtensors at commit {record['commit'][:12]}; KV cache {record['kv_cache']}. "
        f"Loaded in {record['load_seconds']:.1f} s; peak host memory {rss['loaded'] / 1e9:.2f} GB after loading "
        f"({rss['before'] / 1e9:.2f} GB before, with torch), {rss['end'] / 1e9:.2f} GB in the end; "
        f"{record['gpu_bytes'] / 1e9:.1f} GB on the GPU at most. Prompts of {decoded[0]['prompt_tokens']} tokens, one "
        f"after the other: {prompt:,.0f} tokens a second."
    )


def _decode_table(record: Record) -> str:
    peers = VLLM.get(record["checkpoint"], {})
    floor_ms = READ_BYTES.get(record["checkpoint"], 0.0) / record["read_gb_s"] / 1e6
    lines = [
        "| sequences | a step, ms | tokens/s | vLLM 0.26 | ratio | share of the floor of the weights |",
        "|---|---|---|---|---|---|",
    ]
    for one in record["decode"]:
        count, speed = one["sequences"], one["tokens_per_second"]
        peer = peers.get(count)
        share = f"{floor_ms / one['step_ms']:.0%}" if count == 1 and floor_ms else ""
        told, ratio = (f"{peer:,.1f}", f"{speed / peer:.2f}x") if peer else ("", "")
        lines.append(f"| {count} | {one['step_ms']:.2f} | {speed:,.1f} | {told} | {ratio} | {share} |")
    return "\n".join(lines)


def experts_text(folder: Path) -> str:
    """Times of the grouped experts; empty where they have no record."""
    path = folder / "experts-h200.json"
    if not path.exists():
        return ""
    record = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        f"`benchmarks/results/experts-h200.json`, vtensors at commit {record['commit'][:12]}; gate_up and down of a "
        "layer together.",
        "",
        "| scheme | shared expert | tokens | us a layer | ms of 40 layers | GB/s | share of the floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['scheme']} | {'yes' if row['shared_expert'] else 'no'} | {row['m']} | {row['us']:.1f} | "
            f"{row['ms_of_40_layers']:.3f} | {row['gb_s']:,.0f} | {row['share_of_floor']:.0%} |"
        )
    return "\n".join(lines)


def fp8_text(folder: Path) -> str:
    """Times of FP8 linears beside their peers, a table for each record that there is."""
    names = ("linear-fp8-h200.json", "linear-fp8-forms-h200.json")
    return "\n\n".join(_fp8_table(folder / name) for name in names if (folder / name).exists())


def _fp8_table(path: Path) -> str:
    record = json.loads(path.read_text(encoding="utf-8"))
    floors = {floor["nbytes"]: floor["us"] for floor in record["floors"]}
    times: dict[tuple[str, int], dict[str, float]] = {}
    shares: dict[tuple[str, int], float] = {}
    for row in record["rows"]:
        place = row["shape"], row["m"]
        times.setdefault(place, {})[row["impl"]] = row["us"]
        if row["impl"] == "vtensors_fp8" and row["bytes"] in floors:
            shares[place] = floors[row["bytes"]] / row["us"]
    lines = [
        f"`benchmarks/results/{path.name}`, vtensors at commit {record['commit'][:12]}, microseconds.",
        "",
        "| shape | M | 16-bit activations | share of the floor | 128x128 blocks | MXFP8 | W8A8 with its quantizer | "
        "Marlin FP8 | ratio to it | `torch._scaled_mm` alone |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (shape, m), found in times.items():
        ours, marlin = found["vtensors_fp8"], found.get("marlin_fp8")
        share = f"{shares[shape, m]:.0%}" if (shape, m) in shares else ""
        others = ("vtensors_fp8_block", "vtensors_mxfp8", "vtensors_fp8_w8a8", "scaled_mm_fp8")
        block, mx, w8a8, bare = (f"{found[name]:.1f}" if name in found else "" for name in others)
        against = ("", "") if marlin is None else (f"{marlin:.1f}", f"{marlin / ours:.2f}x")
        cells = (shape, m, f"{ours:.1f}", share, block, mx, w8a8, *against, bare)
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def accuracy_text(folder: Path) -> str:
    """Loss by checkpoint and activation precision; empty where there is no record."""
    path = folder / "accuracy-h200.json"
    if not path.exists():
        return ""
    record = json.loads(path.read_text(encoding="utf-8"))
    commits = " and ".join(dict.fromkeys(row.get("commit", record["commit"])[:12] for row in record["rows"]))
    lines = [
        f"`benchmarks/results/accuracy-h200.json`: {record['gpu']}, {record['dtype']}, {record['tokens']:,} tokens, "
        f"vtensors at commit {commits}.",
        "",
        "| checkpoint | activations | executed | loss, nats | float32 oracle | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        oracle = row["oracle"]
        told = ("", "") if oracle is None else (f"{oracle:.4f}", f"{row['loss'] - oracle:+.4f}")
        lines.append(
            f"| {row['checkpoint']} | {row['activations']} | {', '.join(row['executed'])} | {row['loss']:.4f} | "
            f"{told[0]} | {told[1]} |"
        )
    return "\n".join(lines)


# Page, marker, text.
SECTIONS: tuple[tuple[str, str, Text], ...] = (
    ("performance.md", "fp8", fp8_text),
    ("performance.md", "engine", engine_text),
    ("performance.md", "experts", experts_text),
    ("accuracy.md", "accuracy", accuracy_text),
    ("accuracy.md", "rounding", rounding_text),
)


def page_with(page: str, marker: str, text: str) -> str:
    """The page with the text between its markers. Raises ValueError where they are missing."""
    begin, end = f"<!-- {marker}: from benchmarks/results -->", f"<!-- end of {marker} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no '{begin}' ... '{end}'")
    return f"{head}{begin}\n\n{text}\n\n{end}{tail}"


def main() -> None:
    """Rewrite the pages, or with --check exit 1 where one is not as the records say."""
    stale = []
    for name, marker, text in SECTIONS:
        path = REPOSITORY / "docs" / name
        page = path.read_text(encoding="utf-8")
        wanted = page_with(page, marker, text(RESULTS))
        if wanted != page:
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                path.write_text(wanted, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        raise SystemExit(f"not as the records say: {', '.join(dict.fromkeys(stale))}")


if __name__ == "__main__":
    main()
