"""`vtensors kernels`: every registered kernel, what it computes, and whether it can serve a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from vtensors.counts import counted
from vtensors.manager import default_plugins
from vtensors_kernels.compiling.cubin_cache import default_cache_folder
from vtensors_kernels.compiling.nvrtc import Toolkit, find_toolkit
from vtensors_plugins.commands.device_option import ReportDevice, report_device
from vtensors_plugins.commands.kernel_facts import KernelFacts, kernel_facts, require_known_names
from vtensors_plugins.commands.kernel_lists import refused_lines, serving_lines
from vtensors_plugins.commands.schemes_table import hanging

# Folder below the cache folder and what ends the names of its entries.
_CACHES = {"cubin": ".cubin", "verdicts": ".json"}


@attrs.frozen(kw_only=True)
class Compiler:
    """The kernel compiler. toolkit: None where there is none. problem: why it cannot compile for the device.

    doubt: what is known against it for the device.
    """

    toolkit: Toolkit | None
    problem: str | None
    doubt: str | None = None


@click.command("kernels")
@click.option(
    "--device", metavar="N", help="A device of this machine: cpu, cuda:1 or 1 (default: the first GPU)."
)
@click.option("--assume", metavar="TARGET", help="A device that need not be here: sm_90a, sm_121a, ..., cpu.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(device: str | None, assume: str | None, as_json: bool) -> None:
    """List every kernel: what it computes, for which devices, and whether it can serve this one.

    Nothing is compiled or launched. Exit 0, or 2 for a device that is not there and for a VT_KERNELS that names what is
    not there.
    """
    chosen, plugins = report_device(device, assume), default_plugins()
    require_known_names(plugins, plugins.read_switches())
    facts = kernel_facts(plugins, chosen)
    compiler = find_compiler(chosen)
    if as_json:
        click.echo(json.dumps(_json_of(chosen, compiler, facts), indent=1))
        return
    from rich.console import Console

    click.echo("\n".join(text_lines(chosen, compiler, facts, Console().width)))


def find_compiler(device: ReportDevice) -> Compiler:
    """The installed NVRTC, and what stands against it. Imports CuPy where that is installed."""
    found = find_toolkit()
    if isinstance(found, str):
        return Compiler(toolkit=None, problem=found)
    if device.capability is None:
        return Compiler(toolkit=found, problem=None)
    problem = None if found.knows(device.target) else found.refusal(device.target)
    return Compiler(toolkit=found, problem=problem, doubt=found.doubt(device.target))


def text_lines(
    device: ReportDevice, compiler: Compiler, facts: Sequence[KernelFacts], width: int
) -> list[str]:
    """What the command prints: device, compiler, cache, a row per kernel, and why the others cannot serve."""
    lines = [hanging("device    ", device.headline(), width)]
    if device.note:
        lines.append(hanging("          ", device.note, width))
    lines.append(hanging("compiler  ", _compiler_words(compiler), width))
    if compiler.doubt:
        lines.append(hanging("warning   ", compiler.doubt, width))
    folder = default_cache_folder()
    lines.append(hanging("cache     ", f"{folder} ({', '.join(_cache_words(folder))})", width))
    lines += serving_lines([entry for entry in facts if entry.reason is None], width)
    refused = [entry for entry in facts if entry.reason is not None]
    if refused:
        lines += ["", f"cannot serve {device.target}:", *refused_lines(refused, width)]
    return [line for several in lines for line in several.split("\n")]


def _compiler_words(compiler: Compiler) -> str:
    if compiler.toolkit is None:
        return f"none: {compiler.problem}"
    newest = f"{compiler.toolkit.name}, newest target sm_{max(compiler.toolkit.targets)}"
    return f"{newest}; {compiler.problem}" if compiler.problem else newest


def _cache_words(folder: Path) -> list[str]:
    return [counted(count, name.removesuffix("s")) for name, count in _cache_counts(folder).items()]


def _cache_counts(folder: Path) -> dict[str, int]:
    """Entries of each cache; none where the folder is not there or cannot be read."""
    counts = {}
    for name, suffix in _CACHES.items():
        try:
            counts[name] = sum(path.name.endswith(suffix) for path in (folder / name).iterdir())
        except OSError:
            counts[name] = 0
    return counts


def _json_of(device: ReportDevice, compiler: Compiler, facts: Sequence[KernelFacts]) -> dict[str, Any]:
    folder, toolkit = default_cache_folder(), compiler.toolkit
    return {
        **device.to_json(),
        "compiler": {
            "name": None if toolkit is None else toolkit.name,
            "targets": [] if toolkit is None else [f"sm_{number}" for number in toolkit.targets],
            "problem": compiler.problem,
            "doubt": compiler.doubt,
        },
        "cache": {"folder": str(folder), **_cache_counts(folder)},
        "kernels": [entry.to_json() for entry in facts],
    }
