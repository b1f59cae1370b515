"""The table of docs/accuracy.md that `rounding_study.py`'s record gives; `engine_tables.py` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rounding_text(folder: Path) -> str:
    """Errors and changed codes by case, the checkpoints side by side; empty where there is no record."""
    path = folder / "rounding-cpu.json"
    if not path.exists():
        return ""
    record = json.loads(path.read_text(encoding="utf-8"))
    studied = record["checkpoints"]
    lines = [
        f"`benchmarks/results/rounding-cpu.json`: torch {record['versions']['torch']} on a CPU, {record['prompts']} "
        f"prompts of 32 tokens, loss over {record['tokens']:,}. In each cell, in order: "
        f"{', '.join(one['checkpoint'] for one in studied)}.",
        "",
        "| rounded to bfloat16, or to so many bits | largest error | of prompts: median | within 0.15 | mean error | "
        "codes changed | in the first linear | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in zip(*(one["rows"] for one in studied), strict=True):
        lines.append(f"| {rows[0]['case']} | " + " | ".join(_cells(rows)) + " |")
    return "\n".join(lines)


def _cells(rows: tuple[dict[str, Any], ...]) -> list[str]:
    """One cell a column, the checkpoints' numbers with a comma between."""
    prompts = [row["prompts"] for row in rows]
    codes = [row["codes"] for row in rows]
    return [
        ", ".join(f"{row['error']:.3f}" for row in rows),
        ", ".join(f"{one['median']:.3f}" for one in prompts),
        ", ".join(str(one["within"]) for one in prompts),
        ", ".join(f"{one['mean']:.3f}" for one in prompts),
        ", ".join("" if one is None else f"{one['all']:.1%}" for one in codes).strip(", "),
        ", ".join("" if one is None else f"{one['first']:.1%}" for one in codes).strip(", "),
        ", ".join(f"{row['loss']:+.4f}" for row in rows),
    ]
