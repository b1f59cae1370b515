"""What `convert` and `quantize` show: the fate of every module, exact sizes, progress, the files written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from vtensors.checkpoint import Checkpoint
from vtensors.conversion import ConversionPlan, Fate, Unit, WrittenFile, run_plan
from vtensors.conversion.reciprocals import Reciprocals, count_reciprocals
from vtensors.counts import agreeing, counted
from vtensors.errors import RequestError
from vtensors_plugins.commands.progress_bar import progress_bar
from vtensors_plugins.commands.schemes_table import size

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `200MB` or `1000`. Raises RequestError for anything else, or less than one byte."""
    number = text.strip().removesuffix("B").removesuffix("b").strip()
    factor = _UNITS.get(number[-1:].replace("K", "k").replace("g", "G").replace("m", "M"), 1)
    digits = number if factor == 1 else number[:-1]
    try:
        value = int(float(digits) * factor)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise RequestError(
            "--max-shard-size is not a size",
            seen=text,
            accepted="5GB, 200MB, a number of bytes",
            fix="give a number of bytes, with kB, MB, GB or TB behind it",
        )
    return value


def carry_out(
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    destination: Path,
    *,
    dry_run: bool,
    overwrite: bool,
    as_json: bool,
    warnings: tuple[str, ...] = (),
) -> None:
    """Check the reciprocals, then show the plan or do the work and show what was written."""
    reciprocals = count_reciprocals(checkpoint, plan)
    written: tuple[WrittenFile, ...] = ()
    if not dry_run:
        total = sum(shard.size for shard in plan.shards)
        with progress_bar("writing", total, quiet=as_json) as advance:
            written = run_plan(checkpoint, plan, destination, overwrite=overwrite, progress=advance)
    report = plan_report(plan, destination, reciprocals, written, warnings)
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    if dry_run:
        for row in report["modules"]:
            _print_module(row)
        click.echo()
    _print_summary(report, dry_run=dry_run)


def plan_report(
    plan: ConversionPlan,
    destination: Path,
    reciprocals: Reciprocals,
    written: tuple[WrittenFile, ...],
    warnings: tuple[str, ...],
) -> dict[str, Any]:
    """The report as `--json` prints it."""
    digests = {file.file: file for file in written}
    names = [(shard.file, shard.size) for shard in plan.shards]
    names += [(side.name, side.size) for side in plan.files]
    return {
        "source": plan.source,
        "destination": str(destination),
        "target": plan.target,
        "modules": [_module_row(unit) for unit in plan.units],
        "fates": dict(Counter(unit.fate.value for unit in plan.units)),
        "files": [
            {
                "file": name,
                "bytes": nbytes,
                "sha256": digests[name].sha256 if name in digests else None,
                "resumed": digests[name].resumed if name in digests else False,
            }
            for name, nbytes in names
        ],
        "total_bytes": plan.total_bytes,
        "reciprocals": {
            "scalars": reciprocals.scalars,
            "exact": reciprocals.exact,
            "largest_ulps": reciprocals.largest_ulps,
        },
        "left_out": list(plan.left_out),
        "warnings": [*plan.notes, *warnings],
        "written": bool(written),
    }


def _module_row(unit: Unit) -> dict[str, Any]:
    return {
        "module": unit.name,
        "fate": unit.fate.value,
        "before": unit.before,
        "after": unit.after,
        "bytes": unit.nbytes,
        "tensors": [tensor.name for tensor in unit.tensors],
        "left_out": list(unit.left_out),
    }


def _print_module(row: dict[str, Any]) -> None:
    change = row["before"] if row["before"] == row["after"] else f"{row['before']} -> {row['after']}"
    click.echo(f"{row['fate']:<12} {row['bytes']:>14,}  {row['module']}  {change}")
    for text in row["left_out"]:
        click.echo(f"{'left out':<12} {'':>14}  {text}")


def _print_summary(report: dict[str, Any], *, dry_run: bool) -> None:
    # What changes stands before what is kept.
    ordered = sorted(report["fates"].items(), key=lambda item: item[0] == Fate.KEPT.value)
    fates = ", ".join(f"{count} {fate}" for fate, count in ordered)
    click.echo(f"{report['source']} -> {report['target']}: {fates}")
    for file in report["files"]:
        note = "  (finished earlier, verified)" if file["resumed"] else ""
        digest = f"  sha256 {file['sha256'][:16]}" if file["sha256"] else ""
        click.echo(f"  {file['bytes']:>14,}  {file['file']}{digest}{note}")
    found = report["reciprocals"]
    if found["scalars"]:
        click.echo(
            f"{counted(found['scalars'], 'global scale')} {agreeing(found['scalars'], 'becomes its', 'become their')} "
            "reciprocal; taken twice, it is the stored number for "
            f"{found['exact']} of them and at most {found['largest_ulps']} ULP off"
        )
    shown = report["left_out"][:5]
    for text in shown:
        click.echo(f"left out: {text}")
    if len(report["left_out"]) > len(shown):
        click.echo(f"left out: {len(report['left_out']) - len(shown)} more (--json lists them)")
    for text in report["warnings"]:
        click.echo(f"warning: {text}", err=True)
    verb = "would be written to" if dry_run else "written to"
    click.echo(f"{size(report['total_bytes'])} {verb} {report['destination']}")
