"""The progress bar of commands that read or write weights: on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(task: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar of bytes while the block runs; call what it gives with the bytes done since the last call.

    task: shown before the bar. total: bytes. quiet: no bar even on a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from vtensors_plugins.commands.console import CommandConsole

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CommandConsole(stderr=True), transient=True) as progress:
        entry = progress.add_task(task, total=total)
        yield lambda count: progress.advance(entry, count)
