"""Which plugins there are, before any of them is imported, and which of them the user wants."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata

import attrs

from vtensors.hookspecs import ENTRY_POINT_GROUP

_log = logging.getLogger("vtensors")

OWN_DISTRIBUTION = "vtensors"


@attrs.frozen(kw_only=True)
class Candidate:
    """A plugin that can be imported.

    name: name of the entry point, which must be the plugin's own name. value: module (and object) it points
    to. builtin: part of this project. load: imports it and returns the module or object with the hooks.
    """

    name: str
    distribution: str
    version: str
    value: str
    load: Callable[[], object]
    builtin: bool = False

    def is_called(self, name: str) -> bool:
        """Whether the user means this plugin by name: its own or its distribution's, however spelled."""
        return _normal(name) in (_normal(self.name), _normal(self.distribution))


@attrs.frozen(kw_only=True)
class PluginFilter:
    """What VT_PLUGINS says. words: `name` allows, `-name` denies."""

    words: tuple[str, ...] = ()

    def reason_against(self, candidate: Candidate) -> str | None:
        """Why the plugin is not imported, or None.

        A denied plugin is left out, built-in or not. Where any name is allowed, every third party that is
        not named is left out as well.
        """
        denied = [word for word in self.words if word.startswith("-")]
        allowed = [word for word in self.words if not word.startswith("-")]
        for word in denied:
            if candidate.is_called(word[1:]):
                return f"denied by VT_PLUGINS={word}"
        if candidate.builtin or not allowed or any(candidate.is_called(word) for word in allowed):
            return None
        return f"not among the plugins that VT_PLUGINS allows: {', '.join(allowed)}"


def builtin_candidates(builtins: Iterable[tuple[str, str]]) -> list[Candidate]:
    """The candidates for (name, module) pairs of this project, in the order given."""
    version = own_version()
    return [
        Candidate(
            name=name,
            distribution=OWN_DISTRIBUTION,
            version=version,
            value=module,
            load=partial(importlib.import_module, module),
            builtin=True,
        )
        for name, module in builtins
    ]


def find_entry_points() -> list[Candidate]:
    """The entry points of the group `vtensors` of every installed distribution; none is imported."""
    try:
        found = list(metadata.entry_points(group=ENTRY_POINT_GROUP))
    except Exception:
        # One distribution with damaged metadata, of whatever group, fails the call above as a whole.
        found = list(_one_distribution_at_a_time())
    return [
        Candidate(
            name=entry.name,
            distribution=entry.dist.name if entry.dist else "unknown",
            version=entry.dist.version if entry.dist else "unknown",
            value=entry.value,
            load=entry.load,
        )
        for entry in found
    ]


def own_version() -> str:
    """The installed version of this project, `unknown` when it runs from a source tree."""
    try:
        return metadata.version(OWN_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def _one_distribution_at_a_time() -> Iterator[metadata.EntryPoint]:
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            name = _normal(distribution.name)
            entries = list(distribution.entry_points.select(group=ENTRY_POINT_GROUP))
        except Exception as error:
            _log.warning("a distribution has damaged metadata and its plugins are not seen: %r", error)
            continue
        # The first one on the search path is the one that Python imports.
        if name not in seen:
            seen.add(name)
            yield from entries


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
