"""`vtensors plugins`: every plugin that was found, its state, and why it is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs
import click

from vtensors.manager import default_plugins
from vtensors.plugin_loading import PluginStatus

_COLUMNS = ("name", "distribution", "version", "state", "ms", "hooks")


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--tracebacks", is_flag=True, help="Print the whole traceback of each plugin that is left out.")
def command(as_json: bool, tracebacks: bool) -> None:
    """List the plugins: where they come from, what they provide, what is wrong with them."""
    statuses = default_plugins().statuses
    if as_json:
        click.echo(json.dumps({"plugins": [attrs.asdict(status) for status in statuses]}, indent=2))
    else:
        click.echo(format_statuses(statuses, tracebacks=tracebacks))


def format_statuses(statuses: Sequence[PluginStatus], *, tracebacks: bool = False) -> str:
    """A table of the plugins, and below it a line for each one that is left out or replaced in part."""
    rows = [_COLUMNS, *map(_row, statuses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for status in statuses:
        if status.error:
            lines.append(f"\n{status.name} ({status.distribution} {status.version}): {status.error}")
        if status.traceback and tracebacks:
            lines.append(status.traceback.rstrip())
        lines.extend(f"\n{status.name}: {shadowed}" for shadowed in status.shadowed)
    return "\n".join(lines)


def _row(status: PluginStatus) -> tuple[str, ...]:
    # Every plugin has vtensors_plugin, so it tells nothing.
    hooks = [hook.removeprefix("vtensors_") for hook in status.hooks if hook != "vtensors_plugin"]
    return (
        status.name,
        status.distribution,
        status.version,
        status.state,
        f"{status.load_ms:.1f}",
        ", ".join(hooks),
    )
