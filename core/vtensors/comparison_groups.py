"""Differences in words, and those that are alike over layers and experts taken together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from vtensors.module_facts import ModuleFacts, scheme_words

if TYPE_CHECKING:
    from vtensors.comparison import ModuleChange, ModuleChanges


@attrs.frozen(kw_only=True)
class ChangeGroup:
    """The same difference over all modules of one name pattern. kind: `changed`, `added` or `removed`.

    headline: for example `BF16 -> FP8 per row`. details: what follows from it, sentence by sentence.
    bytes_before, bytes_after: stored bytes of all these modules.
    """

    kind: str
    pattern: str
    headline: str
    details: tuple[str, ...]
    modules: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def to_json(self) -> dict[str, Any]:
        """The number of modules instead of their names, which stand under `changed`, `added` and `removed`."""
        return {
            "kind": self.kind,
            "pattern": self.pattern,
            "headline": self.headline,
            "details": list(self.details),
            "modules": len(self.modules),
            "first": self.modules[0],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }


def grouped(changes: ModuleChanges) -> tuple[ChangeGroup, ...]:
    """All differences, alike ones over layers and experts together, in the order of the checkpoint."""
    found: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[str, int, int]]] = {}
    for change in changes.changed:
        before, after = change.before, change.after
        key = ("changed", before.pattern, *describe(change))
        found.setdefault(key, []).append((before.name, before.nbytes, after.nbytes))
    for facts in changes.added:
        key = ("added", facts.pattern, _presence(facts), ())
        found.setdefault(key, []).append((facts.name, 0, facts.nbytes))
    for facts in changes.removed:
        key = ("removed", facts.pattern, _presence(facts), ())
        found.setdefault(key, []).append((facts.name, facts.nbytes, 0))
    return tuple(
        ChangeGroup(
            kind=kind,
            pattern=pattern,
            headline=headline,
            details=details,
            modules=tuple(name for name, _, _ in members),
            bytes_before=sum(size for _, size, _ in members),
            bytes_after=sum(size for _, _, size in members),
        )
        for (kind, pattern, headline, details), members in found.items()
    )


def describe(change: ModuleChange) -> tuple[str, tuple[str, ...]]:
    """A change in words: the headline, then every other aspect."""
    before, after = change.before, change.after
    sentences: list[str] = []
    for aspect in change.what:
        if aspect == "name":
            sentences.append(f"now named {after.pattern}")
        elif aspect == "scheme":
            sentences.append(f"{scheme_words(before.scheme)} -> {scheme_words(after.scheme)}")
        elif aspect == "tensors":
            sentences.extend(_tensor_sentences(change))
        elif aspect == "shape":
            sentences.append(f"shape {list(before.shape)} -> {list(after.shape)}")
        else:
            label = "activations declared" if aspect == "declared" else aspect
            none = "own tensors" if aspect == "stacking" else "none"
            sentences.append(f"{label} {getattr(before, aspect) or none} -> {getattr(after, aspect) or none}")
    first = next((i for i, aspect in enumerate(change.what) if aspect == "scheme"), 0)
    headline = sentences.pop(first)
    return headline, tuple(sentences)


def _tensor_sentences(change: ModuleChange) -> Iterator[str]:
    before, after = change.before.tensors, change.after.tensors
    for role in [*before, *(role for role in after if role not in before)]:
        if role == "codes":
            continue
        if role not in after:
            yield f"{role} {before[role]} gone"
        elif role not in before:
            yield f"{role} {after[role]} new"
        elif before[role] != after[role]:
            yield f"{role} {before[role]} -> {after[role]}"


def _presence(facts: ModuleFacts) -> str:
    shape = f" {list(facts.shape)}" if facts.shape else ""
    tensors = "" if facts.convention else f": {', '.join(f'{r} {t}' for r, t in facts.tensors.items())}"
    return f"{scheme_words(facts.scheme)}{shape}{tensors}"
