"""The tables that `inspect` and `generate` print."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

_UNITS = ("B", "kB", "MB", "GB", "TB")
_LAYER = re.compile(r"^(.*?layers\.\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*experts)\.\d+\.(.+)$")


def size(nbytes: int) -> str:
    """Bytes in decimal units with three significant digits, for example `21.9 GB`."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The whole report: provenance, schemes, waived tensors, conflicts, warnings, problems."""
    console = console or Console(highlight=False)
    _print_provenance(report, console)
    console.print(schemes_table(report["schemes"]))
    for row in report["waived"]:
        console.print(
            f"  waived  {row['tensors']:>6,} tensors  {size(row['bytes']):>8}  {escape(row['reason'])}"
        )
    for row in report["conflicts"]:
        count = f" ({row['modules']:,} modules)" if row["modules"] > 1 else ""
        console.print(f"[yellow]conflict[/]{count}  {escape(row['where'])}", soft_wrap=True)
        console.print(
            f"          says {escape(row['says'])}; found {escape(row['instead'])}\n"
            f"          followed: {escape(row['chosen'])}",
            soft_wrap=True,
        )
    for text in report["warnings"]:
        console.print(f"[yellow]warning[/]  {escape(text)}", soft_wrap=True)
    for text in report["problems"][:20]:
        console.print(f"[red]refused[/]  {escape(text)}", soft_wrap=True)
    hidden = len(report["problems"]) - 20
    if hidden > 0:
        console.print(f"[red]refused[/]  and {hidden:,} more (see --json)")
    if not report["problems"]:
        console.print("Every tensor is consumed or waived by name.")


def _print_provenance(report: dict[str, Any], console: Console) -> None:
    provenance = report["provenance"]
    source = provenance.get("repo") or provenance["source"]
    commit = f" @ {provenance['commit']}" if provenance.get("commit") else ""
    console.print(f"[bold]{escape(str(source))}[/]{commit}", soft_wrap=True)
    hashes = ", ".join(s["header_sha256"][:12] for s in provenance["shards"][:3])
    more = " ..." if len(provenance["shards"]) > 3 else ""
    known = "" if report["plugin"] else " (no architecture plugin knows it)"
    console.print(
        f"{escape(report['architecture'])}{known}, {size(report['total_bytes'])} in {report['tensors']:,} tensors, "
        f"{len(provenance['shards'])} shards (headers {hashes}{more})",
        soft_wrap=True,
    )
    declared = "; ".join(report["declared"]) or "no quantisation declared"
    kv = report["kv_cache"]["declared"]
    cache = f"; KV cache declared {kv}, executed {report['kv_cache']['executed']}" if kv else ""
    console.print(escape(f"declared: {declared}{cache}"), soft_wrap=True)


def schemes_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Rows as `inspect --json` gives them under `schemes`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("scheme")
    table.add_column("convention")
    table.add_column("activations\ndeclared")
    table.add_column("\nexecuted")
    table.add_column("modules", justify="right")
    table.add_column("size", justify="right")
    table.add_column("parts", overflow="fold")
    for row in rows:
        parts = ", ".join(f"{name} {count:,}" for name, count in row.get("parts", {}).items())
        words = f" ({', '.join(row['algorithms'])})" if row.get("algorithms") else ""
        table.add_row(
            row["scheme"],
            row["convention"] + words,
            row["declared"],
            row["executed"],
            f"{row['modules']:,}",
            size(row["bytes"]),
            parts,
        )
    return table


def print_tree(modules: Iterable[dict[str, Any]], console: Console | None = None) -> None:
    """Every module below its layer; experts of one layer that are alike are counted on one line."""
    console = console or Console(highlight=False)
    root = Tree("modules")
    branches: dict[str, Tree] = {}
    counted: dict[tuple[str, str, str], int] = {}
    for module in modules:
        found = _LAYER.match(module["module"])
        branch, name = (found[1], found[2]) if found else ("", module["module"])
        expert = _EXPERT.match(name)
        if expert:
            name = f"{expert[1]}.*.{expert[2]}"
        key = (branch, name, _line(module))
        counted[key] = counted.get(key, 0) + 1
    for (branch, name, line), count in counted.items():
        if branch and branch not in branches:
            branches[branch] = root.add(branch)
        times = f" x{count}" if count > 1 else ""
        (branches[branch] if branch else root).add(escape(f"{name}{times}  {line}"))
    console.print(root)


def _line(module: dict[str, Any]) -> str:
    waived = f"  waived: {module['waived']}" if module["waived"] else ""
    precision = f"  {module['declared']} -> {module['executed']}" if module["algorithm"] else ""
    return f"{module['scheme']} {module['shape']}{precision}{waived}"


def print_modules(
    modules: Iterable[dict[str, Any]], unclaimed: Iterable[dict[str, Any]], console: Console | None = None
) -> None:
    """Each module explained: tensors, evidence, declared, found."""
    console = console or Console(highlight=False)
    for module in modules:
        console.print(
            f"[bold]{escape(module['module'])}[/]  " + escape(f"{module['scheme']} {module['shape']}")
        )
        said = (
            f"{module['algorithm'] or 'nothing'} ({module['declared_by'] or 'no configuration speaks of it'})"
        )
        console.print(escape(f"  declared  {said}; activations {module['declared']}"), soft_wrap=True)
        console.print(escape(f"  executed  activations {module['executed']}"), soft_wrap=True)
        console.print(escape(f"  evidence  {module['evidence']}"), soft_wrap=True)
        if module["waived"]:
            console.print(escape(f"  waived    {module['waived']}"))
        for tensor in module["tensors"]:
            console.print(
                escape(
                    f"  {tensor['role']:<14} {tensor['dtype']:<8} {tensor['shape']!s:<16} "
                    f"{tensor['name']}  ({tensor['file']})"
                ),
                soft_wrap=True,
            )
    for group in unclaimed:
        console.print(f"[red]unclaimed[/] [bold]{escape(group['module'])}[/]")
        for suffix, text in group["tensors"].items():
            console.print(escape(f"  {suffix:<22} {text}"), soft_wrap=True)
        for convention, reason in group["reasons"].items():
            console.print(escape(f"  {convention}: {reason}"), soft_wrap=True)
