"""`vtensors inspect`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from vtensors.activations import MODES
from vtensors.checkpoint import Checkpoint, open_checkpoint
from vtensors.counts import counted
from vtensors.errors import RequestError
from vtensors.inspection import has_findings, inspection, module_report, unclaimed_reports
from vtensors.matching import nearest
from vtensors_plugins.commands.lock_option import lock_option


@click.command("inspect")
@click.argument("source")
@click.option("--revision", help="Branch, tag or commit of a repository.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--tree", is_flag=True, help="Also show every module, layer by layer.")
@click.option("--module", "pattern", metavar="REGEX", help="Only explain the modules whose name matches.")
@click.option("--activations", type=click.Choice(MODES), help="Which precision `executed` shows.")
@lock_option()
@click.pass_context
def command(
    context: click.Context,
    source: str,
    revision: str | None,
    as_json: bool,
    tree: bool,
    pattern: str | None,
    activations: str | None,
    lock: str | None,
) -> None:
    """Show what is in SOURCE: a directory, a .safetensors file, or a repository `org/name[@revision]`.

    Exit 0: a load would accept it; 1: it would not; 2: it cannot be opened at all.
    """
    with _collection_paused():
        checkpoint = open_checkpoint(source, revision, download=False, lock=lock)
        report = inspection(checkpoint, activations) if pattern is None else None
    if pattern is not None or report is None:
        if _explain(checkpoint, str(pattern), activations, as_json=as_json):
            context.exit(1)
        return
    if as_json:
        if tree:
            report["modules"] = _all_modules(checkpoint, activations)
        click.echo(json.dumps(report, indent=1))
    else:
        from vtensors_plugins.commands.inspect_tables import print_report, print_tree

        print_report(report)
        if tree:
            print_tree(_all_modules(checkpoint, activations))
    if has_findings(report) or (
        checkpoint.conflicts and "conflicts" in checkpoint.switches.names("VT_STRICT")
    ):
        context.exit(1)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """A hundred thousand records are made and none is garbage: looking for some would cost a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _all_modules(checkpoint: Checkpoint, activations: str | None) -> list[dict[str, Any]]:
    request = checkpoint.activation_request(activations)
    return [module_report(checkpoint, module, request) for module in checkpoint.modules.values()]


def _explain(checkpoint: Checkpoint, pattern: str, activations: str | None, *, as_json: bool) -> bool:
    """Prints the modules that match; True where no convention reads one of them."""
    try:
        wanted = re.compile(pattern)
    except re.error as problem:
        raise RequestError(
            f"--module is not a regular expression: {problem}",
            seen=repr(pattern),
            accepted="a Python regular expression that is found in a module's name, such as 'layers.0.*q_proj'",
            fix="escape what is meant literally with a backslash",
        ) from problem
    request = checkpoint.activation_request(activations)
    found = [
        module_report(checkpoint, module, request)
        for name, module in checkpoint.modules.items()
        if wanted.search(name)
    ]
    names = [name for name in checkpoint.claims.unclaimed if wanted.search(name)]
    unclaimed = unclaimed_reports(checkpoint, names)
    if not found and not unclaimed:
        near = nearest(pattern, checkpoint.modules)
        raise RequestError(
            "no module matches",
            file=str(checkpoint.provenance.source),
            seen=f"--module {pattern!r}",
            accepted="a regular expression that is found in the name of one of "
            + counted(len(checkpoint.modules), "module")
            + (f", such as {near!r}" if near else ""),
            fix="list the modules with --tree",
        )
    if as_json:
        click.echo(json.dumps({"modules": found, "unclaimed": unclaimed}, indent=1))
    else:
        from vtensors_plugins.commands.inspect_tables import print_modules

        print_modules(found, unclaimed)
    return bool(unclaimed)
