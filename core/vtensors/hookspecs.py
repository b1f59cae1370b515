"""The hooks that plugins implement. Each returns frozen records; none is called per token.

A plugin is a module or object whose functions carry `@vtensors.hookimpl`. The smallest one:

    import vtensors

    @vtensors.hookimpl
    def vtensors_plugin():
        return vtensors.PluginInfo(name="mine", summary="Adds nothing yet.")

All results are collected; the order of registration never decides.
"""

from __future__ import annotations

import pluggy

from vtensors.records import (
    Architecture,
    Command,
    Convention,
    KernelSpec,
    PluginInfo,
    Progress,
    Scheme,
    Selected,
    Switch,
)

PROJECT = "vtensors"
ENTRY_POINT_GROUP = "vtensors"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def vtensors_plugin() -> PluginInfo:  # type: ignore[empty-body]
    """Name, summary and api version of the plugin. Required of every plugin."""


@hookspec
def vtensors_schemes() -> list[Scheme]:  # type: ignore[empty-body]
    """Number formats: a name and the Weight class that holds and dequantizes it."""


@hookspec
def vtensors_conventions() -> list[Convention]:  # type: ignore[empty-body]
    """Checkpoint conventions: accepted forms, how they are declared, how they are read."""


@hookspec
def vtensors_kernels() -> list[KernelSpec]:  # type: ignore[empty-body]
    """Kernels for the documented ops."""


@hookspec
def vtensors_architectures() -> list[Architecture]:  # type: ignore[empty-body]
    """Model families: config match, expected weights, builder."""


@hookspec
def vtensors_switches() -> list[Switch]:  # type: ignore[empty-body]
    """Environment variables that the plugin reads."""


@hookspec
def vtensors_commands() -> list[Command]:  # type: ignore[empty-body]
    """Subcommands of the `vtensors` program."""


@hookspec
def vtensors_selected(record: Selected) -> None:
    """Called once per module when its kernel has been chosen."""


@hookspec
def vtensors_progress(event: Progress) -> None:
    """Called while long work goes on (loading, hashing), at most a few times a second."""
