"""`vtensors verify`: everything that is wrong or doubtful in a checkpoint, listed at once."""

from __future__ import annotations

import importlib.util
import json

import click

from vtensors.counts import counted
from vtensors.errors import RequestError
from vtensors.lock import check_lock
from vtensors.verification.opening import open_tolerantly
from vtensors_plugins.commands.lock_option import lock_option
from vtensors_plugins.commands.progress_bar import progress_bar
from vtensors_plugins.verification.report import Report, verify

# A person reads the first of many like findings; --json lists all.
_SHOWN_PER_CODE = 20


@click.command("verify")
@click.argument("source")
@click.option("--revision", help="Branch, tag or commit of a repository.")
@click.option("--against", metavar="BF16_PATH", help="Compare each weight with this unquantized checkpoint.")
@click.option("--hash", "hashes", is_flag=True, help="Compare contents with the hashes of the Hub's blobs.")
@click.option("--structure-only", is_flag=True, help="Look at headers and configuration alone.")
@lock_option()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    context: click.Context,
    source: str,
    revision: str | None,
    against: str | None,
    hashes: bool,
    structure_only: bool,
    lock: str | None,
    as_json: bool,
) -> None:
    """List everything that is wrong or doubtful in SOURCE: files, headers, declarations, and every value.

    Exit 0: nothing was found; 1: there are findings; 2: there is no checkpoint at all.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    if against is not None and (structure_only or not has_torch):
        raise RequestError(
            "--against reads values" + ("" if has_torch else ", which needs torch"),
            seen="--structure-only" if has_torch else "torch is not installed",
            accepted="--against with torch, and without --structure-only",
            fix="leave --structure-only out" if has_torch else "install torch",
        )
    if not structure_only and not has_torch:
        click.echo("torch is not installed: values are not looked at, headers and files only", err=True)
    reference = open_tolerantly(against) if against is not None else None
    if reference is not None and (reference.checkpoint is None or reference.root is None):
        raise RequestError(
            "the reference cannot be read",
            file=against,
            seen="not a checkpoint whose weights are on this machine",
            accepted="an unquantized checkpoint",
            fix="verify it by itself first",
        )
    opened = open_tolerantly(source, revision)
    if lock is not None and opened.checkpoint is not None:
        check_lock(opened.checkpoint, lock)
    report = verify(
        opened,
        progress_bar,
        values=has_torch and not structure_only,
        hashes=hashes,
        against=reference,
    )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        _print(report)
    if report.findings:
        context.exit(1)


def _print(report: Report) -> None:
    shown: dict[str, int] = {}
    for found in report.findings:
        shown[found.code] = shown.get(found.code, 0) + 1
        if shown[found.code] <= _SHOWN_PER_CODE:
            click.echo(f"{found.severity:7}  {found.code}: {found.tensor}")
            for word, text in (("seen", found.seen), ("expected", found.expected), ("to do", found.fix)):
                click.echo(f"         {word:8} {text}")
    for code, count in shown.items():
        if count > _SHOWN_PER_CODE:
            click.echo(f"and {count - _SHOWN_PER_CODE:,} more of {code} (--json lists all)")
    _print_comparisons(report)
    errors = sum(found.severity == "error" for found in report.findings)
    warnings = len(report.findings) - errors
    looked = f"{counted(report.checked_tensors, 'tensor')}, {report.checked_bytes / 1e6:,.1f} MB read"
    total = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    click.echo(f"{total}; {looked}{'' if report.values else ' (headers only)'}")


def _print_comparisons(report: Report) -> None:
    if not report.comparisons:
        return
    width = max(len(row["module"]) for row in report.comparisons)
    click.echo(f"\n{'module'.ljust(width)}  scheme      cosine     SNR dB  reach dB  max error  verdict")
    for row in report.comparisons:
        snr = "exact" if row["snr_db"] is None else f"{row['snr_db']:.2f}"
        reach = "" if row["reach_db"] is None else f"{row['reach_db']:.2f}"
        click.echo(
            f"{row['module'].ljust(width)}  {row['scheme']:10}  {row['cosine']:.6f}  {snr:>7}  {reach:>8}  "
            f"{row['max_abs_error']:9.3g}  {row['verdict']}"
        )
    click.echo()
