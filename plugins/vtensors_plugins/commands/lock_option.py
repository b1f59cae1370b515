"""The `--lock` option of every command that reads a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from vtensors.lock import LOCK_NAME


def lock_option(name: str = "--lock", *, which: str = "the checkpoint") -> Callable[[Any], Any]:
    """A click option that takes a lock's path; the command gets None where it is not given."""
    return click.option(
        name,
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help=f"Refuse unless {which} is what this lock says ({LOCK_NAME}, from `vtensors lock`).",
    )
