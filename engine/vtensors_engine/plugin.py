"""The engine's own plugin: the commands that run a model."""

from __future__ import annotations

from vtensors.hookspecs import hookimpl
from vtensors.records import Command, PluginInfo


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """Who this plugin is."""
    return PluginInfo(name="engine", summary="Runs models: the `generate` command.")


@hookimpl
def vtensors_commands() -> list[Command]:
    """The command, whose module is imported when it is called."""
    return [
        Command(
            name="generate",
            summary="Complete text with a model, then show speed and executed precision.",
            load="vtensors_engine.commands.generate:command",
        )
    ]
