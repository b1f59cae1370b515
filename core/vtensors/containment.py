"""Calls of what a plugin provides once it is loaded: whatever goes wrong in them is laid to that plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vtensors.errors import PluginError, VtensorsError
from vtensors.registry import Owned

# SystemExit as well: a plugin that leaves must not take the program with it. Ctrl-C is the user's own.
PLUGIN_FAILURES = (Exception, SystemExit)


@contextmanager
def blamed_on(owned: Owned[Any], what: str) -> Iterator[None]:
    """Raises PluginError naming the plugin, its distribution and `what` for anything that is not a refusal.

    VtensorsError passes as it is, and so does running out of memory.
    """
    try:
        yield
    except (VtensorsError, MemoryError):
        raise
    except PLUGIN_FAILURES as problem:
        raise PluginError(
            f"{what} of plugin '{owned.plugin}' ({owned.distribution}) failed",
            seen=f"{type(problem).__name__}: {problem}",
            fix=f"repair or upgrade that distribution, or leave it out with VT_PLUGINS=-{owned.plugin}",
        ) from problem
