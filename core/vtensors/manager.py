"""The plugins of one process: found, imported one by one, checked, and collected into a registry.

    plugins = default_plugins()
    plugins.registry.conventions["modelopt"].record     # the Convention
    plugins.statuses                                    # what `vtensors plugins` shows
    plugins.read_switches().flag("VT_MMAP")

A plugin that cannot be imported, registered or used is quarantined: nothing of it stays registered, its
status keeps the traceback, and one warning line names it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache

import attrs
import pluggy

from vtensors import hookspecs
from vtensors._lazy import BUILTIN_PLUGINS
from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import PluginError
from vtensors.plugin_candidates import Candidate, PluginFilter, builtin_candidates, find_entry_points
from vtensors.plugin_loading import Loaded, PluginStatus, load
from vtensors.records import Progress, Selected, Switch
from vtensors.registry import Registry, resolve
from vtensors.switches import BOOT_SWITCHES, Switches, warn_of_unknown

_log = logging.getLogger("vtensors")


@attrs.define(kw_only=True)
class Plugins:
    """The enabled plugins, their records, and the status of every plugin that was found.

    registry: records by kind and name. statuses: built-in plugins first, then third parties by name.
    prefer: the plugin or distribution that `VT_PREFER` names, or ``.
    """

    registry: Registry
    statuses: tuple[PluginStatus, ...]
    prefer: str = ""
    _manager: pluggy.PluginManager
    _failed_observers: set[str] = attrs.field(factory=set, init=False)
    _told_switches: set[str] = attrs.field(factory=set, init=False)

    @classmethod
    def discover(
        cls,
        *,
        builtins: Iterable[tuple[str, str]] = BUILTIN_PLUGINS,
        third_parties: Iterable[Candidate] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Plugins:
        """All plugins: the built-in ones, then the third parties' (default: entry points of the environment).

        environ gives VT_PLUGINS, VT_PREFER and VT_STRICT. Raises SwitchError for a bad value of these, and
        PluginError for the first quarantined plugin where VT_STRICT contains `plugins`.
        """
        environ = os.environ if environ is None else environ
        boot = {switch.name: environ[switch.name] for switch in BOOT_SWITCHES if switch.name in environ}
        switches = Switches.read(BOOT_SWITCHES, boot)
        wanted = PluginFilter(words=switches.names("VT_PLUGINS"))
        prefer = switches.text("VT_PREFER")
        found = find_entry_points() if third_parties is None else third_parties
        candidates = [
            *builtin_candidates(builtins),
            *sorted(found, key=lambda candidate: (candidate.name, candidate.distribution)),
        ]
        _warn_of_unknown_names(candidates, wanted, prefer)

        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        loaded = [load(candidate, manager, wanted) for candidate in candidates]
        loaded = _without_repeated_names(loaded, manager)
        resolution = resolve(
            [entry.provided for entry in loaded if entry.provided is not None], prefer=prefer
        )
        loaded = [
            entry.quarantine(manager, resolution.refused[entry.status.name])
            if entry.provided is not None and entry.status.name in resolution.refused
            else entry.shadow(resolution.shadowed.get(entry.status.name, ()))
            for entry in loaded
        ]
        manager.check_pending()
        statuses = tuple(entry.status for entry in loaded)
        _report(statuses, strict="plugins" in switches.names("VT_STRICT"))
        return cls(registry=resolution.registry, statuses=statuses, prefer=prefer, manager=manager)

    @property
    def quarantined(self) -> tuple[PluginStatus, ...]:
        """The plugins that are left out because something is wrong with them."""
        return tuple(status for status in self.statuses if status.state == "quarantined")

    def read_switches(self, environ: Mapping[str, str] | None = None) -> Switches:
        """All declared switches as they stand in environ (default: the process environment) now.

        A `VT_*` variable that is none of them is warned of once.
        """
        return Switches.read(self._declared().values(), environ, told=self._told_switches)

    def warn_of_unknown_switches(self) -> None:
        """One warning for each `VT_*` variable of the process environment that is no switch, said once."""
        warn_of_unknown(self._declared(), told=self._told_switches)

    def _declared(self) -> dict[str, Switch]:
        declared = {switch.name: switch for switch in BOOT_SWITCHES}
        return declared | {name: owned.record for name, owned in self.registry.switches.items()}

    def selected(self, record: Selected) -> None:
        """Tell every observer which kernel a module got; one that raises is named once, then left out."""
        self._tell("vtensors_selected", "record", record)

    def progress(self, event: Progress) -> None:
        """Tell every observer how far long work is; one that raises is named once, then left out."""
        self._tell("vtensors_progress", "event", event)

    def _tell(self, hook: str, argument: str, value: Selected | Progress) -> None:
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        for impl in caller.get_hookimpls():
            if impl.plugin_name in self._failed_observers:
                continue
            try:
                impl.function(*([value] if argument in impl.argnames else []))
            except PLUGIN_FAILURES as error:
                name = impl.plugin_name
                self._failed_observers.add(name)
                _log.warning("plugin '%s' failed in %s and is left out of it: %r", name, hook, error)


def default_plugins() -> Plugins:
    """The plugins of this environment, found once per value of VT_PLUGINS, VT_PREFER and VT_STRICT."""
    return _plugins_for(tuple(os.environ.get(switch.name) for switch in BOOT_SWITCHES))


@lru_cache(maxsize=8)
def _plugins_for(values: tuple[str | None, ...]) -> Plugins:
    environ = {
        switch.name: value for switch, value in zip(BOOT_SWITCHES, values, strict=True) if value is not None
    }
    return Plugins.discover(environ=environ)


def _without_repeated_names(loaded: list[Loaded], manager: pluggy.PluginManager) -> list[Loaded]:
    """A plugin name is one plugin's: a third party loses it to a built-in, two third parties both lose it."""
    active = [entry for entry in loaded if entry.provided is not None]
    result: list[Loaded] = []
    for entry in loaded:
        others = [other for other in active if other is not entry and other.status.name == entry.status.name]
        if entry.provided is None or not others or (entry.status.builtin and not others[0].status.builtin):
            result.append(entry)
            continue
        distributions = " and ".join(sorted({other.status.distribution for other in others}))
        result.append(
            entry.quarantine(
                manager,
                f"the plugin name '{entry.status.name}' of distribution {entry.status.distribution} "
                f"is also used by {distributions}; uninstall one of them",
            )
        )
    return result


def _warn_of_unknown_names(candidates: list[Candidate], wanted: PluginFilter, prefer: str) -> None:
    known = ", ".join(sorted({candidate.name for candidate in candidates}))
    for switch, words in (("VT_PLUGINS", wanted.words), ("VT_PREFER", (prefer,) if prefer else ())):
        for name in (word.removeprefix("-") for word in words):
            if not any(candidate.is_called(name) for candidate in candidates):
                _log.warning("%s names '%s', which is not installed; plugins: %s", switch, name, known)


def _report(statuses: Iterable[PluginStatus], *, strict: bool) -> None:
    for status in statuses:
        if status.state != "quarantined":
            continue
        if strict:
            raise PluginError(
                f"plugin '{status.name}' of {status.distribution} {status.version} is refused",
                seen=status.error,
                fix=f"repair or uninstall it, leave it out with VT_PLUGINS=-{status.name}, "
                "or take 'plugins' out of VT_STRICT",
            )
        _log.warning(
            "plugin '%s' of %s %s is left out: %s (see `vtensors plugins`)",
            status.name,
            status.distribution,
            status.version,
            status.error,
        )
