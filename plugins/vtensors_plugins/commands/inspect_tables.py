"""What `inspect` prints for a person: the report, the tree of modules, one module explained."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from vtensors.counts import agreeing, counted
from vtensors_plugins.commands.console import CommandConsole
from vtensors_plugins.commands.schemes_table import hanging, schemes_table, size

_LAYER = re.compile(r"^(.*?layers\.\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*experts)\.\d+\.(.+)$")
_SHOWN_PROBLEMS = 20
_COLORS = {"conflict": "yellow", "warning": "yellow", "refused": "red"}


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The whole report: provenance, schemes, waived tensors, conflicts, warnings, problems."""
    console = console or CommandConsole(highlight=False)
    _print_provenance(report, console)
    console.print()
    console.print(schemes_table(report["schemes"], console.width), markup=False, soft_wrap=True)
    console.print()
    for row in report["waived"]:
        tensors = f"{row['tensors']:>7,} {agreeing(row['tensors'], 'tensor ', 'tensors')}"
        _say(console, f"waived   {tensors}  {size(row['bytes']):>7}  ", row["reason"])
    for row in report["conflicts"]:
        count = f" ({row['modules']:,} modules)" if row["modules"] > 1 else ""
        _say(console, "conflict ", f"{row['where']}{count}")
        _say(console, "         says      ", row["says"])
        _say(console, "         against   ", row["instead"])
        _say(console, "         followed  ", row["chosen"])
    for text in report["warnings"]:
        _say(console, "warning  ", text)
    for text in report["problems"][:_SHOWN_PROBLEMS]:
        _say(console, "refused  ", text)
    hidden = len(report["problems"]) - _SHOWN_PROBLEMS
    if hidden > 0:
        _say(console, "refused  ", f"and {hidden:,} more (see --json)")
    if not report["problems"]:
        console.print("Every tensor is consumed or waived by name.")


def _say(console: Console, head: str, text: str) -> None:
    """The text behind its head, wrapped below itself; lines that the text already has stay lines."""
    word = head.split(" ", 1)[0]
    first, *rest = text.split("\n")
    lines = [hanging(head, first, console.width)]
    lines += [hanging(" " * len(head) + "  ", line.strip(), console.width) for line in rest]
    shown = escape("\n".join(lines))
    if word in _COLORS:
        shown = f"[{_COLORS[word]}]{word}[/]{shown[len(word) :]}"
    console.print(shown, soft_wrap=True)


def _print_provenance(report: dict[str, Any], console: Console) -> None:
    provenance, shards = report["provenance"], report["provenance"]["shards"]
    source = provenance.get("repo") or provenance["source"]
    commit = f" @ {provenance['commit']}" if provenance.get("commit") else ""
    console.print(f"[bold]{escape(str(source))}[/]{commit}", soft_wrap=True)
    known = "" if report["plugin"] else " (no architecture plugin knows it)"
    tensors, files = counted(report["tensors"], "tensor"), counted(len(shards), "shard")
    total = f"{size(report['total_bytes'])} in {tensors}, {files}"
    _say(console, "  ", f"{report['architecture']}{known}, {total}")
    _say(console, "  declared  ", "; ".join(report["declared"]) or "no quantization")
    kv = report["kv_cache"]
    if kv["declared"]:
        _say(console, "  KV cache  ", f"declared {kv['declared']}, executed {kv['executed']}")
    hashes = ", ".join(shard["header_sha256"][:12] for shard in shards[:3])
    _say(console, "  headers   ", f"sha256 {hashes}{' ...' if len(shards) > 3 else ''}")


def print_tree(modules: Iterable[dict[str, Any]], console: Console | None = None) -> None:
    """Every module below its layer; experts of one layer that are alike are counted on one line."""
    console = console or CommandConsole(highlight=False)
    root = Tree("modules")
    branches: dict[str, Tree] = {}
    alike: dict[tuple[str, str, str], int] = {}
    for module in modules:
        found = _LAYER.match(module["module"])
        branch, name = (found[1], found[2]) if found else ("", module["module"])
        expert = _EXPERT.match(name)
        if expert:
            name = f"{expert[1]}.*.{expert[2]}"
        key = (branch, name, _line(module))
        alike[key] = alike.get(key, 0) + 1
    for (branch, name, line), count in alike.items():
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
    console = console or CommandConsole(highlight=False)
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
