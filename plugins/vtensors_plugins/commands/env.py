"""`vtensors env`: the switches with their values, and what a report needs to say of the machine."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from importlib import metadata

import attrs
import click

from vtensors.errors import RequestError
from vtensors.manager import Plugins, default_plugins
from vtensors.plugin_candidates import OWN_DISTRIBUTION
from vtensors.records import Switch
from vtensors.switches import SwitchValue, accepted_words
from vtensors_kernels.compiling.architectures import OLDEST, target_of
from vtensors_kernels.compiling.devices import find_devices
from vtensors_kernels.compiling.known_bad import PACKAGES, installed_build, installed_versions, known_bad
from vtensors_plugins.commands.kernel_facts import require_known_names

# Distributions whose versions decide how a checkpoint is read or run. None of them is imported here.
DISTRIBUTIONS = (
    "vtensors",
    "torch",
    "numpy",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "jinja2",
    "attrs",
    "pluggy",
    "click",
    "rich",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    *PACKAGES,
    "triton",
)

_MARKDOWN_HEAD = """# Environment variables

Every switch is read once, when a model is loaded or a command starts. A value that is not accepted is an
error that names the accepted ones; an unknown `VT_*` variable gives a warning. `vtensors env` shows the
values in force. A plugin may bring switches of its own; these are the built-in ones.

This file is written by `vtensors env --markdown`.

| variable | accepted | default | what it does |
|---|---|---|---|"""


@attrs.frozen(kw_only=True)
class Environment:
    """What the command shows. versions: distribution -> version, None where it is not installed.

    warnings: what is known against the installed compiler on the GPUs that are here.
    """

    switches: tuple[SwitchValue, ...]
    owners: dict[str, str]
    versions: dict[str, str | None]
    platform: dict[str, str]
    warnings: tuple[str, ...] = ()


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the documentation of the built-in switches.")
def command(as_json: bool, markdown: bool) -> None:
    """Show every switch with its value, and the versions that matter in a report."""
    if as_json and markdown:
        raise RequestError(
            "--json and --markdown cannot be combined",
            seen="both",
            accepted="one of the two",
            fix="leave one of them out",
        )
    plugins = default_plugins()
    if markdown:
        owned = plugins.registry.switches.values()
        click.echo(markdown_of(entry.record for entry in owned if entry.distribution == OWN_DISTRIBUTION))
        return
    environment = read_environment(plugins)
    click.echo(json.dumps(_json_of(environment), indent=2) if as_json else _text_of(environment))


def read_environment(plugins: Plugins) -> Environment:
    """The switches, versions and platform as they are now.

    Raises SwitchError for a bad value, and for a name in `VT_KERNELS` that is not there.
    """
    switches = plugins.read_switches()
    require_known_names(plugins, switches)
    return Environment(
        switches=tuple(switches.values[name] for name in sorted(switches.values)),
        owners={name: owned.plugin for name, owned in plugins.registry.switches.items()},
        versions={name: _version(name) for name in DISTRIBUTIONS},
        platform={
            "python": sys.version.split()[0],
            "implementation": platform.python_implementation(),
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
        },
        warnings=compiler_warnings(),
    )


def compiler_warnings() -> tuple[str, ...]:
    """What is known against each installed NVRTC package, for each GPU that is here. Imports neither of them."""
    devices = find_devices()
    if isinstance(devices, str):
        return ()
    targets = [target_of(device.capability) for device in devices if device.capability >= OLDEST]
    told = (
        known_bad(version, target, installed_build(version))
        for version in installed_versions()
        for target in targets
    )
    return tuple(dict.fromkeys(line for line in told if line is not None))


def markdown_of(switches: Iterable[Switch]) -> str:
    """The text of docs/environment.md."""
    lines = [_MARKDOWN_HEAD]
    for switch in sorted(switches, key=lambda switch: switch.name):
        default = f"`{switch.default}`" if switch.default else "(unset)"
        lines.append(f"| `{switch.name}` | {accepted_words(switch)} | {default} | {switch.summary} |")
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _json_of(environment: Environment) -> dict[str, object]:
    return {
        "switches": [
            {
                "name": entry.switch.name,
                "kind": entry.switch.kind,
                "value": entry.value,
                "default": entry.switch.default,
                "source": entry.source,
                "accepted": accepted_words(entry.switch),
                "summary": entry.switch.summary,
                "plugin": environment.owners.get(entry.switch.name),
            }
            for entry in environment.switches
        ],
        "versions": environment.versions,
        "platform": environment.platform,
        "warnings": list(environment.warnings),
    }


def _text_of(environment: Environment) -> str:
    width = max(len(entry.switch.name) for entry in environment.switches)
    lines = ["switches"]
    for entry in environment.switches:
        lines.append(f"  {entry.switch.name.ljust(width)}  {_shown(entry)}  ({entry.source})")
        lines.append(f"  {' ' * width}  {entry.switch.summary}")
    for title, facts in (("versions", environment.versions), ("platform", environment.platform)):
        lines.append(f"\n{title}")
        lines.extend(f"  {name.ljust(width)}  {value or 'not installed'}" for name, value in facts.items())
    if environment.warnings:
        lines += ["\nwarnings", *(f"  {text}" for text in environment.warnings)]
    return "\n".join(lines)


def _shown(entry: SwitchValue) -> str:
    if isinstance(entry.value, bool):
        return "1" if entry.value else "0"
    if isinstance(entry.value, float):
        return f"{entry.value:g}"
    text = ",".join(entry.value) if isinstance(entry.value, tuple) else entry.value
    return text or "(empty)"
