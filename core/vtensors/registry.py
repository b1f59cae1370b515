"""What the enabled plugins provide, by kind and name, each record with the plugin that owns it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import attrs

from vtensors.record_checks import AnyRecord
from vtensors.records import Architecture, Command, Convention, KernelSpec, Scheme, Switch

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# Hook -> the word for one of its records.
KIND_WORDS = {
    "vtensors_schemes": "scheme",
    "vtensors_conventions": "convention",
    "vtensors_kernels": "kernel",
    "vtensors_architectures": "architecture",
    "vtensors_switches": "switch",
    "vtensors_commands": "command",
}


@attrs.frozen(kw_only=True)
class Owned(Generic[R_co]):
    """A record and who provides it: plugin name, distribution name."""

    record: R_co
    plugin: str
    distribution: str


@attrs.frozen(kw_only=True)
class Registry:
    """Every record of the enabled plugins, by kind and name. Names are unique within a kind."""

    schemes: Mapping[str, Owned[Scheme]] = attrs.field(factory=dict)
    conventions: Mapping[str, Owned[Convention]] = attrs.field(factory=dict)
    kernels: Mapping[str, Owned[KernelSpec]] = attrs.field(factory=dict)
    architectures: Mapping[str, Owned[Architecture]] = attrs.field(factory=dict)
    switches: Mapping[str, Owned[Switch]] = attrs.field(factory=dict)
    commands: Mapping[str, Owned[Command]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Provided:
    """What one plugin provides. records: hook -> its records, already checked."""

    plugin: str
    distribution: str
    builtin: bool
    records: Mapping[str, Sequence[AnyRecord]]

    def is_called(self, name: str) -> bool:
        """Whether the user means this plugin by name: its own or its distribution's."""
        return name in (self.plugin, self.distribution)


@attrs.frozen(kw_only=True)
class Resolution:
    """The registry, and what became of names that were provided twice.

    refused: plugin -> why it cannot be enabled. shadowed: plugin -> its records that another one replaces.
    """

    registry: Registry
    refused: Mapping[str, str]
    shadowed: Mapping[str, tuple[str, ...]]


def resolve(provided: Sequence[Provided], *, prefer: str = "") -> Resolution:
    """One registry out of what the plugins provide; no result depends on the order of the plugins.

    A name provided twice goes to the plugin that the user prefers, or to the one convention that declares
    that it overrides that name. Otherwise a third party that repeats a built-in name is refused, and so are
    all third parties that repeat one another's; the message names every distribution.
    """
    refused: dict[str, str] = {}
    alive = list(provided)
    while more := _refusals(alive, prefer):
        refused |= more
        alive = [plugin for plugin in alive if plugin.plugin not in refused]
    winners = {key: _winner(*key, owners, prefer) for key, owners in _repeated(alive).items()}
    shadowed: dict[str, list[str]] = defaultdict(list)
    for (hook, name), owners in _repeated(alive).items():
        winner = winners[hook, name]
        for owner in owners:
            if owner is not winner:
                shadowed[owner.plugin].append(f"{KIND_WORDS[hook]} '{name}' (replaced by '{winner.plugin}')")
    return Resolution(
        registry=_registry(alive, winners),
        refused=refused,
        shadowed={plugin: tuple(lines) for plugin, lines in shadowed.items()},
    )


Key = tuple[str, str]


def _repeated(provided: Iterable[Provided]) -> dict[Key, list[Provided]]:
    owners: dict[Key, list[Provided]] = defaultdict(list)
    for plugin in provided:
        for hook, records in plugin.records.items():
            for record in records:
                owners[hook, record.name].append(plugin)
    return {key: plugins for key, plugins in owners.items() if len(plugins) > 1}


def _refusals(provided: list[Provided], prefer: str) -> dict[str, str]:
    """Plugin -> reason, for those against a built-in; where there are none, for the other repeats."""
    refused: dict[str, str] = {}
    for among_third_parties in (False, True):
        for (hook, name), owners in _repeated(provided).items():
            for loser in _losers(hook, name, owners, prefer, among_third_parties):
                others = [other for other in owners if other is not loser]
                named = " and ".join(f"'{other.plugin}' of {other.distribution}" for other in others)
                refused.setdefault(
                    loser.plugin,
                    f"the {KIND_WORDS[hook]} '{name}' of {loser.distribution} is also provided by {named}; "
                    "disable one (VT_PLUGINS=-name) or prefer one (VT_PREFER=name)",
                )
        if refused:
            break
    return refused


def _losers(
    hook: str, name: str, owners: list[Provided], prefer: str, among_third_parties: bool
) -> list[Provided]:
    """The owners that must go: first those against a built-in, then third parties against one another."""
    if _preferred(owners, prefer) is not None:
        return []
    overriders = [owner for owner in owners if _overrides(owner, hook, name)]
    third_parties = [owner for owner in owners if not owner.builtin]
    has_builtin = len(third_parties) < len(owners)
    if not among_third_parties:
        return [owner for owner in third_parties if owner not in overriders] if has_builtin else []
    if len(third_parties) > 1:
        return third_parties if len(overriders) != 1 else []
    # Two built-ins of one name is a mistake of this project: neither may win by its place in a list.
    return owners if len(owners) - len(third_parties) > 1 and not overriders else []


def _winner(hook: str, name: str, owners: list[Provided], prefer: str) -> Provided:
    preferred = _preferred(owners, prefer)
    if preferred is not None:
        return preferred
    return next(owner for owner in owners if _overrides(owner, hook, name))


def _preferred(owners: list[Provided], prefer: str) -> Provided | None:
    found = [owner for owner in owners if prefer and owner.is_called(prefer)]
    return found[0] if len(found) == 1 else None


def _overrides(owner: Provided, hook: str, name: str) -> bool:
    return any(
        isinstance(record, Convention) and record.name == name and name in record.overrides
        for record in owner.records.get(hook, ())
    )


def _registry(provided: Iterable[Provided], winners: Mapping[Key, Provided]) -> Registry:
    def collect(hook: str, record_type: type[R]) -> dict[str, Owned[R]]:
        return {
            record.name: Owned(record=record, plugin=plugin.plugin, distribution=plugin.distribution)
            for plugin in provided
            for record in plugin.records.get(hook, ())
            if isinstance(record, record_type) and winners.get((hook, record.name), plugin) is plugin
        }

    return Registry(
        schemes=collect("vtensors_schemes", Scheme),
        conventions=collect("vtensors_conventions", Convention),
        kernels=collect("vtensors_kernels", KernelSpec),
        architectures=collect("vtensors_architectures", Architecture),
        switches=collect("vtensors_switches", Switch),
        commands=collect("vtensors_commands", Command),
    )
