"""Which architecture plugins know a model, and what the one that does expects of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from vtensors.containment import PLUGIN_FAILURES, blamed_on
from vtensors.errors import PluginError
from vtensors.records import Architecture, ModelPlan
from vtensors.registry import Owned


@attrs.frozen(kw_only=True)
class Knowing:
    """architectures: those that know the model. warnings: one for each that failed to say."""

    architectures: tuple[Owned[Architecture], ...]
    warnings: tuple[str, ...]


def who_knows(architectures: Iterable[Owned[Architecture]], config: Mapping[str, Any]) -> Knowing:
    """The architectures that know config.json; one that raises is left out with a warning."""
    found, warnings = [], []
    for owned in architectures:
        try:
            knows = bool(owned.record.matches(config))
        except PLUGIN_FAILURES as problem:  # a broken plugin must not stop the others
            warnings.append(
                f"architecture '{owned.record.name}' of plugin '{owned.plugin}' ({owned.distribution}) failed and "
                f"was left out: {type(problem).__name__}: {problem}"
            )
            continue
        if knows:
            found.append(owned)
    return Knowing(architectures=tuple(found), warnings=tuple(warnings))


def plan_of(owned: Owned[Architecture], config: Mapping[str, Any], modules: Sequence[str]) -> ModelPlan:
    """The architecture's plan for the modules of a checkpoint.

    Errors: what the architecture refuses; PluginError naming it where it fails or returns something else.
    """
    with blamed_on(owned, f"the architecture '{owned.record.name}'"):
        plan: object = owned.record.plan(config, modules)
    if not isinstance(plan, ModelPlan):
        raise PluginError(
            f"plan() of architecture '{owned.record.name}' of plugin '{owned.plugin}' ({owned.distribution}) "
            "does not return a plan",
            seen=type(plan).__name__,
            accepted="ModelPlan",
            fix="repair or upgrade that distribution",
        )
    return plan
