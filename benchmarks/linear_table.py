"""The tables of docs/performance.md, made from what `linear.py` wrote.

python benchmarks/linear_table.py            rewrites docs/performance.md
python benchmarks/linear_table.py --check    exits 1 if that would change it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import linear_goals as table
from linear_goals import Row

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "performance.md"
RECORD = REPOSITORY / "benchmarks" / "results" / "linear-h200.json"
BEGIN, END = "<!-- from benchmarks/results/linear-h200.json -->", "<!-- end -->"
Record = Mapping[str, Any]


def page_with(page: str, record: Record) -> str:
    """The page with the tables of the record between its markers. Raises ValueError where they are missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no '{BEGIN}' ... '{END}'")
    return f"{head}{BEGIN}\n\n{whole_text(record)}\n\n{END}{tail}"


def whole_text(record: Record) -> str:
    """Everything between the markers: device, goals, times, floors, failures."""
    parts = [device_line(record), "### Goals", goals_table(record), "### Times", *times_tables(record)]
    parts += ["### Read floors", floors_table(record)]
    if record["failures"]:
        parts += ["### Not measured", failures_table(record)]
    return "\n\n".join(parts)


def device_line(record: Record) -> str:
    """What it was measured on, with which versions, which implementations ran, and what Marlin's column is."""
    versions, method = record["versions"], record["method"]
    words = [
        f"{record['gpu']}, driver {record['driver']}, {record['toolkit']}, torch {versions['torch']}, "
        f"CuPy {versions['cupy']}, vtensors {versions['vtensors']}"
        + (f" at commit {record['commit'][:12]}" if record["commit"] else "")
        + ".",
        f"{method['replays']} replays a time, graphs of about {method['graph_us'] / 1e3:g} ms, "
        f"{method['rotated_bytes'] / 1e6:.0f} MB or more of weights in rotation, "
        f"{record['seconds']:.0f} s in all.",
    ]
    if run := impls_run(record):
        words.append(f"Implementations that were run, as `--impls` takes them: `{','.join(run)}`.")
    if record["read_peak"]:
        peak = record["read_peak"]
        words.append(f"A launch that reads {peak['bytes'] / 1e9:.1f} GB reaches {peak['gb_s']} GB/s.")
    if versions["marlin"]:
        words.append(f"Marlin is that of {versions['marlin']}, measured in the same run.")
    else:
        words.append(
            "**Marlin was not there to be measured**: its column holds published times of vLLM 0.26.0 on an H200, "
            "scaled by cuBLAS of this run over cuBLAS as published; M = 32 and the 35B's shapes were not published."
        )
    if record["switches"]:
        words.append("Switches: " + ", ".join(f"{k}={v}" for k, v in record["switches"].items()) + ".")
    if not record["complete"]:
        words.append("**The run was cut short.**")
    return "\n".join(words)


def impls_run(record: Record) -> list[str]:
    """Names of what was timed or failed, in the order in which it was run; published times were not run."""
    names = dict.fromkeys(entry["impl"] for part in ("rows", "failures") for entry in record[part])
    return [name for name in names if name != table.MARLIN_SCALED]


def goals_table(record: Record) -> str:
    """Every goal with pass or miss, those of FP8 where it was measured, those beyond what is asked last."""
    lines = ["| goal | wanted | measured | |", "|---|---|---|---|"]
    goals = [*table.goals(record["rows"]), *table.fp8_goals(record["rows"])]
    for goal in sorted(goals, key=lambda goal: goal.stretch):
        where = f" ({goal.where})" if goal.where else ""
        what = f"stretch: {goal.what}" if goal.stretch else goal.what
        verdict = f"**{goal.verdict}**" if goal.verdict == "missed" and not goal.stretch else goal.verdict
        lines.append(f"| {what} | {goal.told(goal.wanted)} | {goal.told(goal.got)}{where} | {verdict} |")
    return "\n".join(lines)


def times_tables(record: Record) -> list[str]:
    """One table per shape: microseconds of every implementation, ours with its share of the floor and its kernel.

    The column without PDL is there where that was timed for any shape.
    """
    rows: Sequence[Row] = record["rows"]
    apart = any(row["impl"] == table.OURS_APART for row in rows)
    found = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        found.append(_times_table(shape, mine, apart))
    return found


def _times_table(shape: str, rows: Sequence[Row], apart: bool) -> str:
    n, k = rows[0]["n"], rows[0]["k"]
    floor = next((row["floor_us"] for row in rows if row["impl"] == table.OURS), None)
    told = f"floor {floor:.1f} µs" if floor is not None else "no floor"
    heads = ["M", "vtensors", "of the floor", "spread", *(["without PDL"] if apart else [])]
    heads += ["Marlin", "Marlin / vtensors", "cuBLAS bf16", "`_scaled_mm` fp8", "kernel"]
    lines = [
        f"**{shape}**, {n} x {k}, {table.nvfp4_bytes(n, k) / 1e6:.1f} MB as NVFP4, {told}",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for m in sorted({row["m"] for row in rows}):
        ours, marlin = table.find(rows, shape, m, table.OURS), table.marlin_row(rows, shape, m)
        ratio = table.ratio(rows, shape, m)
        scaled = " (scaled)" if marlin is not None and marlin["impl"] == table.MARLIN_SCALED else ""
        cells = [
            str(m),
            _us(ours),
            "-" if ours is None else f"{ours['share_of_floor']:.0%}",
            "-" if ours is None else f"{ours['spread']:.1%}",
            *([_us(table.find(rows, shape, m, table.OURS_APART))] if apart else []),
            _us(marlin) + scaled,
            "-" if ratio is None else f"{ratio:.2f}x",
            _us(table.find(rows, shape, m, table.CUBLAS)),
            _us(table.find(rows, shape, m, table.SCALED_MM)),
            "-" if ours is None else f"`{ours['kernel']}`" + (" + PDL" if ours["dependent_launch"] else ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def floors_table(record: Record) -> str:
    """The fastest launch that only reads, for every number of bytes that a weight here has."""
    lines = [
        "| MB | µs | GB/s | best loads, µs | best bulk copies, µs | fastest |",
        "|---|---|---|---|---|---|",
    ]
    for floor in sorted(record["floors"], key=lambda floor: floor["nbytes"]):
        bulk = "-" if floor["bulk_us"] is None else f"{floor['bulk_us']:.2f}"
        lines.append(
            f"| {floor['nbytes'] / 1e6:.1f} | {floor['us']:.2f} | {floor['gb_s']} | {floor['loads_us']:.2f} | {bulk} "
            f"| {floor['how']} |"
        )
    return "\n".join(lines)


def failures_table(record: Record) -> str:
    """What has no row, and why."""
    lines = ["| shape | M | implementation | reason |", "|---|---|---|---|"]
    for failure in record["failures"]:
        m = "all" if failure["m"] is None else failure["m"]
        reason = " ".join(str(failure["reason"]).split()).replace("|", "\\|")
        lines.append(f"| {failure['shape']} | {m} | {failure['impl']} | {reason} |")
    return "\n".join(lines)


def _us(row: Row | None) -> str:
    if row is None:
        return "-"
    us = float(row["us"])
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def main(arguments: Sequence[str]) -> int:
    """Rewrite the page, or with --check compare only; returns the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = page_with(page, json.loads(RECORD.read_text(encoding="utf-8")))
    if wanted == page:
        return 0
    if list(arguments) == ["--check"]:
        print(f"docs/{PAGE.name} is out of date: run python benchmarks/linear_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
