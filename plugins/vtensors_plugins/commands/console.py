"""The terminal that commands print to through rich: a reader who has left ends the program as anywhere else."""

from __future__ import annotations

from rich.console import Console


class CommandConsole(Console):
    """rich's console, whose own answer to a closed pipe would be exit status 1, which is that of findings."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled: the program ends with 141."""
        raise  # rich calls this while it handles that error
