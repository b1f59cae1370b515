"""`vtensors diff`: what changed from one checkpoint to another, by their headers or by their weights too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from vtensors.checkpoint import Checkpoint, open_checkpoint
from vtensors.comparison import Comparison, compare
from vtensors_plugins.commands.diff_lines import report_lines, value_lines
from vtensors_plugins.commands.lock_option import lock_option
from vtensors_plugins.commands.progress_bar import progress_bar

if TYPE_CHECKING:
    from vtensors_plugins.comparison_values import ValueComparison


@click.command("diff")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option(
    "--values", is_flag=True, help="Read and compare the weights too; both must be on this machine."
)
@lock_option("--lock-a", which="A")
@lock_option("--lock-b", which="B")
@lock_option(which="A")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    context: click.Context,
    before: str,
    after: str,
    values: bool,
    lock_a: str | None,
    lock_b: str | None,
    lock: str | None,
    as_json: bool,
) -> None:
    """Show what changed from A to B: directories, .safetensors files, or repositories `org/name[@revision]`.

    Exit 0: identical; 1: they differ; 2: one of them cannot be opened. Without --values no weight is read, and
    of a repository only the headers are fetched.
    """
    if lock_a is not None and lock is not None:
        raise click.UsageError("--lock and --lock-a are the same; give one of them.")
    one = open_checkpoint(before, download=False, lock=lock_a or lock)
    two = open_checkpoint(after, download=False, lock=lock_b)
    comparison = compare(one, two)
    compared = _compare_values(one, two, comparison) if values else None
    identical = comparison.identical and (compared is None or compared.verdict == "same bits")
    if as_json:
        report = comparison.to_json()
        if compared is not None:
            report |= {"identical": identical, "compared": "values", "values": compared.to_json()}
        click.echo(json.dumps(report, indent=1))
    else:
        for line in report_lines(comparison):
            click.echo(line)
        for line in value_lines(compared) if compared is not None else ():
            click.echo(line)
    if not identical:
        context.exit(1)


def _compare_values(one: Checkpoint, two: Checkpoint, comparison: Comparison) -> ValueComparison:
    from vtensors_plugins.comparison_values import compare_values, total_bytes

    changes = (comparison.modules, comparison.kv_scales)
    with progress_bar("comparing", total_bytes(one, two, comparison.modules)) as advance:
        return compare_values(one, two, changes, advance)
