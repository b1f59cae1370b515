"""`vtensors conventions`: every accepted spelling of a weight, as the enabled plugins declare it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs
import click

from vtensors.errors import RequestError
from vtensors.manager import default_plugins
from vtensors.plugin_candidates import OWN_DISTRIBUTION
from vtensors.records import Convention
from vtensors.registry import Owned

if TYPE_CHECKING:
    from rich.table import Table

# A file that is kept true by a test must not change with what else is installed.
_PAGE = "Print the documentation: of the built-in conventions, or of the named ones."


@click.command("conventions")
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help=_PAGE)
def command(names: tuple[str, ...], as_json: bool, markdown: bool) -> None:
    """List the accepted tensors, dtypes and shapes of each convention; NAMES: only these conventions."""
    if as_json and markdown:
        raise RequestError(
            "--json and --markdown cannot be combined",
            seen="both",
            accepted="one of the two",
            fix="leave one of them out",
        )
    found = default_plugins().registry.conventions
    unknown = [name for name in names if name not in found]
    if unknown:
        raise RequestError(
            "no such convention",
            seen=", ".join(unknown),
            accepted=", ".join(found),
            fix="name one of these, or none to see all",
        )
    chosen = [found[name] for name in names] if names else list(found.values())
    if as_json:
        click.echo(json.dumps({"conventions": [_json_of(owned) for owned in chosen]}, indent=1))
    elif markdown:
        from vtensors_plugins.commands.conventions_page import page, sections

        builtin = [owned.record for owned in chosen if owned.distribution == OWN_DISTRIBUTION]
        click.echo(sections(owned.record for owned in chosen) if names else page(builtin))
    else:
        print_conventions(chosen)


def print_conventions(conventions: Iterable[Owned[Convention]]) -> None:
    """One table per convention to stdout: a group of lines per form, a line per tensor."""
    from rich.markup import escape

    from vtensors_plugins.commands.console import CommandConsole
    from vtensors_plugins.commands.schemes_table import hanging

    console = CommandConsole(highlight=False)
    for owned in conventions:
        record = owned.record
        console.print(f"[bold]{escape(record.name)}[/]  (plugin {owned.plugin} of {owned.distribution})")
        console.print(escape(hanging("  ", record.summary, console.width)))
        if record.quant_methods:
            console.print(escape(f"  declared by quant_method {', '.join(record.quant_methods)}"))
        if record.forms:
            console.print(_table(record))
        console.print()


def _table(convention: Convention) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("scheme", "tensor", "dtype", "shape", "role"):
        table.add_column(head, max_width=14 if head == "dtype" else None, no_wrap=head == "tensor")
    for form in convention.forms:
        scheme = form.scheme
        for tensor in form.tensors:
            name = tensor.suffix if tensor.required else f"({tensor.suffix})"
            role = f"{tensor.role}, {tensor.sense}" if tensor.sense else tensor.role
            cells = (scheme, name, " ".join(tensor.dtypes), "\n".join(tensor.shapes), role)
            table.add_row(*(Text(cell) for cell in cells))
            scheme = ""
    return table


def _json_of(owned: Owned[Convention]) -> dict[str, Any]:
    record = owned.record
    return {
        "name": record.name,
        "plugin": owned.plugin,
        "distribution": owned.distribution,
        "summary": record.summary,
        "quant_methods": list(record.quant_methods),
        "overrides": list(record.overrides),
        "forms": [attrs.asdict(form) for form in record.forms],
    }
