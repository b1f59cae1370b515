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
        name="diff",
        summary="Show what changed from one checkpoint to another, by headers or by weights.",
        load="vtensors_plugins.commands.diff:command",
    ),
    Command(
        name="lock",
        summary="Write down what a checkpoint is, so that a later change is refused by name.",
        load="vtensors_plugins.commands.lock:command",
    ),
    Command(
        name="conventions",
        summary="List the accepted spellings of a weight: tensors, dtypes, shapes, senses of scales.",
        load="vtensors_plugins.commands.conventions:command",
    ),
    Command(
        name="verify",
        summary="List everything that is wrong or doubtful in a checkpoint.",
        load="vtensors_plugins.commands.verify:command",
    ),
    Command(
        name="convert",
        summary="Write a checkpoint in another convention, or in another scheme of one.",
        load="vtensors_plugins.commands.convert:command",
    ),
    Command(
        name="quantize",
        summary="Quantize an unquantized checkpoint by a recipe.",
        load="vtensors_plugins.commands.quantize:command",
    ),
    Command(
        name="kernels",
        summary="List every kernel: what it computes, and whether it can serve a device.",
        load="vtensors_plugins.commands.kernels:command",
    ),
    Command(
        name="explain",
        summary="Show which kernel computes each weight of a checkpoint, and why not another one.",
        load="vtensors_plugins.commands.explain:command",
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
    return PluginInfo(
        name="commands",
        summary=(
            "The commands inspect, diff, lock, conventions, verify, convert, quantize, kernels, explain, plugins "
            "and env."
        ),
    )


@hookimpl
def vtensors_commands() -> list[Command]:
    """The built-in subcommands."""
    return list(COMMANDS)
