"""The built-in subcommands of `vtensors`; each one's module is imported when it is called."""

from __future__ import annotations

from vtensors.hookspecs import hookimpl
from vtensors.records import Command, PluginInfo

COMMANDS = (
    Command(
        name="inspect",
        summary="Show what a checkpoint holds, from its headers alone.",
        load="vtensors_plugins.commands.inspect:command",
    ),
    Command(
        name="plugins",
        summary="List the plugins: where they come from, what they provide, what is wrong with them.",
        load="vtensors_plugins.commands.plugins:command",
    ),
    Command(
        name="env",
        summary="Show every switch with its value, and the versions that matter in a report.",
        load="vtensors_plugins.commands.env:command",
    ),
)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """Who this plugin is."""
    return PluginInfo(name="commands", summary="The commands inspect, plugins and env.")


@hookimpl
def vtensors_commands() -> list[Command]:
    """The built-in subcommands."""
    return list(COMMANDS)
