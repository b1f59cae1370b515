"""The `vtensors` program: finds the subcommand that a plugin provides, runs it, and reports what it refuses.

Exit status: 0 fine, 1 findings, 2 usage or refused input, 70 a mistake of this program, 130 interrupted.
click is imported here; a subcommand's own module is imported when that subcommand runs.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

import click

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import PluginError, VtensorsError
from vtensors.manager import Plugins, default_plugins
from vtensors.plugin_candidates import own_version
from vtensors.records import Command
from vtensors.registry import Owned

EXIT_FINE = 0
EXIT_FINDINGS = 1
EXIT_REFUSED = 2
EXIT_MISTAKE = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class PluginGroup(click.Group):
    """A click group whose subcommands are the registry's; their modules are imported one at a time."""

    def __init__(self, find_plugins: Callable[[], Plugins]) -> None:
        super().__init__(
            name="vtensors",
            help="Open LLM checkpoints in any quantization convention, explain them and run them.",
            params=[
                click.Option(
                    ["--version"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_print_version,
                    help="Show the version and exit.",
                )
            ],
        )
        self._find_plugins = find_plugins

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all subcommands, sorted."""
        return sorted(self._commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The click command of that name, its module imported now. Raises PluginError if that fails."""
        owned = self._commands().get(cmd_name)
        return None if owned is None else import_command(owned)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that args begin with. An unknown one is an error with the nearest name."""
        name = args[0]
        if not name.startswith("-") and name not in self._commands():
            near = difflib.get_close_matches(name, self._commands(), n=1)
            known = ", ".join(self.list_commands(ctx))
            hint = f"Did you mean '{near[0]}'?" if near else f"Commands: {known}."
            ctx.fail(f"There is no command '{name}'. {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; switches that nobody reads are told before, whatever it does."""
        self._find_plugins().warn_of_unknown_switches()
        return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and summaries of all subcommands without importing any of them."""
        rows = [(name, owned.record.summary) for name, owned in sorted(self._commands().items())]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def _commands(self) -> dict[str, Owned[Command]]:
        return dict(self._find_plugins().registry.commands)


def import_command(owned: Owned[Command]) -> click.Command:
    """The click command that a record points to. Raises PluginError naming the plugin if there is none."""
    module_name, _, attribute = owned.record.load.partition(":")
    try:
        command = getattr(importlib.import_module(module_name), attribute)
    except PLUGIN_FAILURES as error:
        raise PluginError(
            (
                f"the command '{owned.record.name}' of plugin '{owned.plugin}' ({owned.distribution}) cannot be "
                f"imported from {owned.record.load}"
            ),
            seen=f"{type(error).__name__}: {error}",
            accepted="a click.Command",
            fix="repair or upgrade that distribution",
        ) from error
    if not isinstance(command, click.Command):
        raise PluginError(
            f"the command '{owned.record.name}' of plugin '{owned.plugin}' ({owned.distribution}) is not a "
            "click command",
            seen=type(command).__name__,
            accepted="a click.Command",
            fix="repair or upgrade that distribution",
        )
    return command


def main(args: Sequence[str] | None = None, *, find_plugins: Callable[[], Plugins] = default_plugins) -> int:
    """Run the program and return its exit status. args: the words behind its name (default: sys.argv)."""
    _ready_streams()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    words = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    try:
        status = _run(words, find_plugins, as_json)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        _drop_output()
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_REFUSED
    except (KeyboardInterrupt, EOFError, click.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(words: list[str], find_plugins: Callable[[], Plugins], as_json: bool) -> int:
    try:
        group = PluginGroup(find_plugins)
        with group.make_context("vtensors", words) as context:
            result = group.invoke(context)
        # A command may return its exit status or leave with ctx.exit(status).
        return result if isinstance(result, int) and not isinstance(result, bool) else EXIT_FINE
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except VtensorsError as error:
        if as_json:
            click.echo(json.dumps({"error": error_record(error)}))
        else:
            click.echo(f"error: {error}", err=True)
        return EXIT_REFUSED
    except click.ClickException as error:
        if as_json:
            used = error.ctx if isinstance(error, click.UsageError) else None
            path = "vtensors" if used is None else used.command_path
            usage = VtensorsError(
                error.format_message(), seen=" ".join(["vtensors", *words]), fix=f"see `{path} --help`"
            )
            click.echo(json.dumps({"error": error_record(usage) | {"type": type(error).__name__}}))
        else:
            error.show()
        return EXIT_REFUSED
    except (BrokenPipeError, click.Abort, EOFError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            raise
        traceback.print_exc()
        click.echo("this is a mistake in vtensors or in one of its plugins; please report it", err=True)
        return EXIT_MISTAKE


def _ready_streams() -> None:
    """Standard streams that take any text: what their encoding lacks is escaped, missing ones go nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the whole run
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What Python flushes at exit goes nowhere instead of raising again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_record(error: VtensorsError) -> dict[str, str | None]:
    """An error as `--json` prints it."""
    return {
        "type": type(error).__name__,
        "message": error.problem,
        "file": error.file,
        "tensor": error.tensor,
        "seen": error.seen,
        "accepted": error.accepted,
        "fix": error.fix,
    }


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"vtensors {own_version()}")
        ctx.exit()
