"""What differs between two checkpoints by their headers and configurations alone; no weight byte is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.comparison_groups import grouped
from vtensors.config_comparison import ConfigChange, config_changes
from vtensors.module_facts import ModuleFacts, canonical_name, kv_scale_facts, module_facts
from vtensors.provenance import Provenance


@attrs.frozen(kw_only=True, slots=True)
class ModuleChange:
    """A module that both checkpoints hold and that is not the same in both.

    what: the aspects that differ, of `name` (another prefix dialect), `scheme`, `convention`, `shape`,
    `stacking`, `declared`, `algorithm` and `tensors` (dtype, shape or presence of a scale, bias or other tensor
    beside the codes).
    """

    before: ModuleFacts
    after: ModuleFacts
    what: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """An entry of `changed`; module is the name in the first checkpoint."""
        return {
            "module": self.before.name,
            "what": list(self.what),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


@attrs.frozen(kw_only=True)
class ModuleChanges:
    """pairs: all modules of both sides that were matched, as (name before, name after)."""

    changed: tuple[ModuleChange, ...]
    added: tuple[ModuleFacts, ...]
    removed: tuple[ModuleFacts, ...]
    pairs: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed)

    def to_json(self) -> dict[str, Any]:
        """changed, added and removed, complete."""
        return {
            "changed": [change.to_json() for change in self.changed],
            "added": [_entry(facts) for facts in self.added],
            "removed": [_entry(facts) for facts in self.removed],
        }


@attrs.frozen(kw_only=True)
class StatementChange:
    """One statement about the whole checkpoint: architecture, declared quantization, KV cache, file size."""

    what: str
    before: str | int | None
    after: str | int | None


@attrs.frozen(kw_only=True)
class Comparison:
    """modules, kv_scales: by module. statements: about the whole. config: keys of the configuration files."""

    before: Provenance
    after: Provenance
    modules: ModuleChanges
    kv_scales: ModuleChanges
    statements: tuple[StatementChange, ...]
    config: tuple[ConfigChange, ...]

    @property
    def identical(self) -> bool:
        """Whether headers and configurations say the same of every module; shards may be cut otherwise."""
        return not (self.modules or self.kv_scales or self.statements or self.config)

    def to_json(self) -> dict[str, Any]:
        """The complete report of `diff --json`."""
        return {
            "identical": self.identical,
            "compared": "headers",
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            **self.modules.to_json(),
            "unchanged": len(self.modules.pairs) - len(self.modules.changed),
            "groups": [g.to_json() for m in (self.modules, self.kv_scales) for g in grouped(m)],
            "kv_scales": self.kv_scales.to_json(),
            "statements": [attrs.asdict(statement) for statement in self.statements],
            "config": [change.to_json() for change in self.config],
        }


def compare(before: Checkpoint, after: Checkpoint) -> Comparison:
    """The differences from the first checkpoint to the second."""
    return Comparison(
        before=before.provenance,
        after=after.provenance,
        modules=compare_modules(module_facts(before), module_facts(after)),
        kv_scales=compare_modules(
            kv_scale_facts(before.snapshot.tensors.values()), kv_scale_facts(after.snapshot.tensors.values())
        ),
        statements=tuple(_statements(before, after)),
        config=config_changes(before.snapshot, after.snapshot),
    )


def compare_modules(before: Mapping[str, ModuleFacts], after: Mapping[str, ModuleFacts]) -> ModuleChanges:
    """Changes from one set of modules to the other: matched by name, then by name in any prefix dialect."""
    left = {canonical_name(name): name for name in after if name not in before}
    pairs: list[tuple[str, str]] = []
    removed: list[ModuleFacts] = []
    for name, facts in before.items():
        other = name if name in after else left.pop(canonical_name(name), None)
        if other is None:
            removed.append(facts)
        else:
            pairs.append((name, other))
    matched = {name for _, name in pairs}
    return ModuleChanges(
        changed=tuple(
            ModuleChange(before=before[name], after=after[other], what=what)
            for name, other in pairs
            if (what := _aspects(before[name], after[other]))
        ),
        added=tuple(facts for name, facts in after.items() if name not in matched),
        removed=tuple(removed),
        pairs=tuple(pairs),
    )


def _entry(facts: ModuleFacts) -> dict[str, Any]:
    return {"module": facts.name, **facts.to_json()}


# --- aspects ----------------------------------------------------------------------------------------------


def _aspects(before: ModuleFacts, after: ModuleFacts) -> tuple[str, ...]:
    if before == after:
        return ()
    found = [
        aspect
        for aspect in ("name", "scheme", "convention", "shape", "stacking", "declared", "algorithm")
        if getattr(before, aspect) != getattr(after, aspect)
    ]
    if _beside_codes(before, after) != _beside_codes(after, before):
        found.append("tensors")
    return tuple(found)


def _beside_codes(facts: ModuleFacts, other: ModuleFacts) -> dict[str, str]:
    """The module's tensors without its codes; dtypes alone where one of the two is stacked."""
    tensors = {role: text for role, text in facts.tensors.items() if role != "codes"}
    if facts.stacking == other.stacking:
        return tensors
    return {role: text.partition(" ")[0] for role, text in tensors.items()}


def _statements(before: Checkpoint, after: Checkpoint) -> Iterable[StatementChange]:
    for what, one, two in (
        ("architecture", before.architecture_name, after.architecture_name),
        ("declared", _summary(before), _summary(after)),
        ("kv_cache", _kv(before), _kv(after)),
    ):
        if one != two:
            yield StatementChange(what=what, before=one, after=two)


def _summary(checkpoint: Checkpoint) -> str | None:
    said: Sequence[str] = [
        c.declaration.summary for c in checkpoint.claimants if c.declaration and c.declaration.summary
    ]
    return "; ".join(said) or None


def _kv(checkpoint: Checkpoint) -> str | None:
    return checkpoint.kv_cache.algorithm if checkpoint.kv_cache else None
