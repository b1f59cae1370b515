"""Imports, registers and checks one plugin; whatever goes wrong stays with that plugin."""

from __future__ import annotations

import difflib
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FunctionType

import attrs
import pluggy

from vtensors import hookspecs
from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import PluginError
from vtensors.plugin_candidates import Candidate, PluginFilter
from vtensors.record_checks import RECORD_TYPES, AnyRecord, check_info, check_records
from vtensors.records import PluginInfo
from vtensors.registry import Provided

HOOK_NAMES = tuple(name for name in vars(hookspecs) if name.startswith("vtensors_"))


@attrs.frozen(kw_only=True)
class PluginStatus:
    """What became of a plugin.

    state: `active`, `denied` (by VT_PLUGINS, never imported) or `quarantined` (something is wrong with it).
    hooks: the hooks it implements. load_ms: milliseconds to import it and call its hooks.
    error: one line; traceback: all lines, or ``. shadowed: its records that another plugin replaces.
    """

    name: str
    distribution: str
    version: str
    value: str
    builtin: bool
    state: str
    summary: str = ""
    hooks: tuple[str, ...] = ()
    load_ms: float = 0.0
    error: str = ""
    traceback: str = ""
    shadowed: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Loaded:
    """A plugin after loading. plugin and provided are None unless its state is `active`."""

    status: PluginStatus
    plugin: object | None = None
    provided: Provided | None = None

    def quarantine(self, manager: pluggy.PluginManager, error: str) -> Loaded:
        """The same plugin without its registration."""
        _unregister(manager, self.plugin)
        return Loaded(status=attrs.evolve(self.status, state="quarantined", error=error))

    def shadow(self, shadowed: tuple[str, ...]) -> Loaded:
        """The same plugin with the records that another one replaces."""
        return attrs.evolve(self, status=attrs.evolve(self.status, shadowed=shadowed)) if shadowed else self


def load(candidate: Candidate, manager: pluggy.PluginManager, wanted: PluginFilter) -> Loaded:
    """The plugin, imported, registered and asked for its records; or its status without them."""
    status = PluginStatus(
        name=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        value=candidate.value,
        builtin=candidate.builtin,
        state="denied",
        error=wanted.reason_against(candidate) or "",
    )
    if status.error:
        return Loaded(status=status)
    start = time.perf_counter()
    plugin: object | None = None
    try:
        plugin = candidate.load()
        manager.register(plugin, name=f"{candidate.name} ({candidate.distribution})")
        hooks = _hooks_of(plugin, manager)
        info, records = _ask(candidate, hooks)
    except PLUGIN_FAILURES as error:
        _unregister(manager, plugin)
        return Loaded(
            status=attrs.evolve(
                status,
                state="quarantined",
                error=_one_line(error),
                traceback=traceback.format_exc(),
                load_ms=_since(start),
            )
        )
    return Loaded(
        status=attrs.evolve(
            status, state="active", summary=info.summary, hooks=tuple(hooks), load_ms=_since(start)
        ),
        plugin=plugin,
        provided=Provided(
            plugin=candidate.name,
            distribution=candidate.distribution,
            builtin=candidate.builtin,
            records=records,
        ),
    )


def _hooks_of(plugin: object, manager: pluggy.PluginManager) -> Mapping[str, pluggy.HookImpl]:
    """Hook name -> implementation, in the order of the specs. Raises PluginError for what cannot be one."""
    found: dict[str, pluggy.HookImpl] = {}
    for caller in manager.get_hookcallers(plugin) or ():
        impl = next(impl for impl in caller.get_hookimpls() if impl.plugin is plugin)
        if impl.wrapper or impl.hookwrapper:
            raise PluginError(
                f"{caller.name} is a wrapper; plugins cannot wrap one another's hooks",
                accepted="plain hook implementations",
                fix="leave wrapper=True out of @hookimpl",
            )
        if caller.has_spec():
            found[caller.name] = impl
        elif not impl.optionalhook:
            raise PluginError(f"there is no hook '{caller.name}'", fix=_nearest(caller.name))
    for name in (name for name in dir(plugin) if name.startswith("vtensors_")):
        # A hook without its marker would be silently ignored.
        if name not in found and isinstance(getattr(plugin, name), FunctionType):
            known = name in HOOK_NAMES
            fix = "put @vtensors.hookimpl above it" if known else _nearest(name)
            raise PluginError(f"the function '{name}' is not marked as a hook", fix=fix)
    if "vtensors_plugin" not in found:
        raise PluginError(
            "it has no vtensors_plugin(), which says who it is",
            seen=f"hooks: {', '.join(found) or 'none'}",
            fix="add vtensors_plugin() with @vtensors.hookimpl; it returns a vtensors.PluginInfo",
        )
    return {name: found[name] for name in HOOK_NAMES if name in found}


def _ask(
    candidate: Candidate, hooks: Mapping[str, pluggy.HookImpl]
) -> tuple[PluginInfo, Mapping[str, Sequence[AnyRecord]]]:
    """The plugin's info and its records by hook; all of them are asked for exactly once."""
    info = check_info(hooks["vtensors_plugin"].function())
    if info.name != candidate.name:
        raise PluginError(
            f"its entry point is called '{candidate.name}', but vtensors_plugin() says '{info.name}'",
            fix="use one name for both, so that VT_PLUGINS can name the plugin before it is imported",
        )
    records = {name: check_records(name, hooks[name].function()) for name in RECORD_TYPES if name in hooks}
    return info, records


def _unregister(manager: pluggy.PluginManager, plugin: object | None) -> None:
    if plugin is not None and manager.is_registered(plugin):
        manager.unregister(plugin)


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, HOOK_NAMES, n=1, cutoff=0.0)
    return f"the nearest hook is {near[0]}; all hooks: {', '.join(HOOK_NAMES)}"


def _one_line(error: BaseException) -> str:
    if isinstance(error, PluginError):
        return "; ".join(part for part in (error.problem, error.seen, error.fix) if part)
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def _since(start: float) -> float:
    return round((time.perf_counter() - start) * 1000, 3)
