"""A checkpoint pinned in a small file: commit, header hashes, sizes, configurations and every module's scheme.

    lock = make_lock(vtensors.open_checkpoint("org/name"))
    write_lock(lock, Path("vtensors.lock.json"))
    vtensors.open_checkpoint("org/name", lock="vtensors.lock.json")     # LockError where anything moved

What is unknown on either side is not compared: the commit and repository of a plain directory, and files that
a repository opened by its headers alone does not fetch. Weights are not read; a commit pins them, headers and
sizes do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vtensors.counts import counted
from vtensors.errors import LockError
from vtensors.lock_file import LOCK_NAME, Lock, ModuleGroup, parse_lock, read_lock, write_lock
from vtensors.module_facts import ModuleFacts, kv_scale_facts, module_facts
from vtensors.plugin_candidates import own_version

if TYPE_CHECKING:
    from vtensors.checkpoint import Checkpoint
    from vtensors.snapshot import Snapshot

__all__ = [
    "LOCK_NAME",
    "Lock",
    "ModuleGroup",
    "check_lock",
    "differences",
    "make_lock",
    "parse_lock",
    "read_lock",
    "write_lock",
]

# Everything beside the shards that changes what a model is or says.
LOCKED_FILES = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_NAMED_AT_MOST = 12


def make_lock(checkpoint: Checkpoint) -> Lock:
    """The lock of a checkpoint as it is now; no weight byte is read."""
    provenance = checkpoint.provenance
    facts = [
        *module_facts(checkpoint).values(),
        *kv_scale_facts(checkpoint.snapshot.tensors.values()).values(),
    ]
    return Lock(
        source=provenance.repo or Path(provenance.source).name,
        repo=provenance.repo,
        revision=provenance.revision,
        commit=provenance.commit,
        shards=provenance.shards,
        files=_file_hashes(checkpoint.snapshot),
        modules=len(facts),
        modules_sha256=_digest(facts),
        groups=_groups(facts),
        written_by=f"vtensors {own_version()}",
    )


def check_lock(checkpoint: Checkpoint, lock: Lock | str | Path) -> None:
    """Raises LockError naming everything that moved since the lock was made. lock: a lock or its file."""
    file = None if isinstance(lock, Lock) else str(lock)
    locked = lock if isinstance(lock, Lock) else read_lock(Path(lock))
    moved = tuple(differences(locked, make_lock(checkpoint)))
    if not moved:
        return
    shown = [counted(len(moved), "difference"), *moved[:_NAMED_AT_MOST]]
    if len(moved) > _NAMED_AT_MOST:
        shown.append(f"and {len(moved) - _NAMED_AT_MOST} more")
    pinned = f"{locked.repo}@{locked.commit}" if locked.repo and locked.commit else "what was locked"
    error = LockError(
        "the checkpoint is not the one that was locked",
        file=f"{checkpoint.provenance.source} (lock: {file or locked.source})",
        seen="\n    ".join(shown),
        fix=f"open {pinned}, or look at the change with `vtensors diff` and write the lock again",
    )
    error.moved = moved
    raise error


def differences(locked: Lock, now: Lock) -> Iterator[str]:
    """One sentence for everything that moved from the locked state to the present one."""
    for what, before, after in (
        ("repository", locked.repo, now.repo),
        ("commit", locked.commit, now.commit),
    ):
        if before is not None and after is not None and before != after:
            yield f"{what}: {before} -> {after}"
    yield from _moved_shards(locked, now)
    for name, before in locked.files.items():
        if name in now.files and now.files[name] != before:
            after = now.files[name]
            change = "gone" if after is None else "new" if before is None else "changed"
            yield f"{name}: {change} ({_short(before)} -> {_short(after)})"
    yield from _moved_modules(locked, now)


def _moved_shards(locked: Lock, now: Lock) -> Iterator[str]:
    before, after = ({shard.file: shard for shard in lock.shards} for lock in (locked, now))
    for name in sorted({*before, *after}):
        one, two = before.get(name), after.get(name)
        if one is None or two is None:
            yield f"{name}: {'new shard' if one is None else 'shard is gone'}"
            continue
        if one.header_sha256 != two.header_sha256:
            yield f"{name}: header changed ({_short(one.header_sha256)} -> {_short(two.header_sha256)})"
        if one.size != two.size:
            yield f"{name}: size {one.size} -> {two.size} bytes"


def _moved_modules(locked: Lock, now: Lock) -> Iterator[str]:
    if locked.modules_sha256 == now.modules_sha256:
        return
    detailed = all(group.tensors is not None for group in locked.groups)
    moved = list(_moved_kinds(locked, now, _kind))
    if not moved and detailed:
        moved = list(_moved_kinds(locked, now, _tensors_of))
    other = "other names" if detailed else "other names, or with other tensors"
    yield from moved or [f"modules: the same kinds and counts under {other}"]
    if locked.shards == now.shards and locked.written_by != now.written_by:
        yield f"(the headers are the same; locked by {locked.written_by}, read by {now.written_by})"


def _moved_kinds(locked: Lock, now: Lock, words: Callable[[ModuleGroup], str]) -> Iterator[str]:
    """One sentence per pattern of names whose modules, in these words, are not what they were."""
    before, after = (_counts(lock, words) for lock in (locked, now))
    for pattern in dict.fromkeys((*before, *after)):
        one, two = before.get(pattern, {}), after.get(pattern, {})
        if one != two:
            yield f"modules {pattern}: {_counted(one)} -> {_counted(two)}"


def _counts(lock: Lock, words: Callable[[ModuleGroup], str]) -> dict[str, dict[str, int]]:
    """pattern -> the words of a kind -> how many modules."""
    found: dict[str, dict[str, int]] = {}
    for group in lock.groups:
        kinds = found.setdefault(group.pattern, {})
        kinds[words(group)] = kinds.get(words(group), 0) + group.modules
    return found


def _kind(group: ModuleGroup) -> str:
    words = [group.scheme, str(list(group.shape)) if group.shape else "", group.convention]
    words += [group.declared, group.algorithm]
    return " ".join(word for word in words if word)


def _tensors_of(group: ModuleGroup) -> str:
    return f"{group.scheme} ({group.tensors or 'nothing beside the codes'})"


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()) or "none"


def _short(digest: str | None) -> str:
    return "absent" if digest is None else digest[:12]


# --- hashes -----------------------------------------------------------------------------------------------


def _file_hashes(snapshot: Snapshot) -> dict[str, str | None]:
    """SHA-256 of each file that can be known here, None where it does not exist."""
    hashes: dict[str, str | None] = {}
    for name in LOCKED_FILES:
        if snapshot.root is None and name not in (snapshot.side_files or {}):
            continue
        data = snapshot.read_bytes(name)
        hashes[name] = None if data is None else hashlib.sha256(data).hexdigest()
    return hashes


def _digest(facts: list[ModuleFacts]) -> str:
    """SHA-256 over one JSON line per module, sorted by name and scheme."""
    lines = sorted(
        json.dumps(
            [
                f.name,
                f.scheme,
                f.convention,
                list(f.shape),
                f.declared,
                f.algorithm,
                f.stacking,
                dict(f.tensors),
            ]
        )
        for f in facts
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _beside(facts: ModuleFacts) -> str:
    """Scales, biases and the like in one line; the codes too where they are a part of a stacked tensor."""
    shown = sorted(role for role in facts.tensors if role != "codes" or facts.stacking)
    return ", ".join(f"{role} {facts.tensors[role]}" for role in shown)


def _groups(facts: list[ModuleFacts]) -> tuple[ModuleGroup, ...]:
    alike: dict[tuple[str, str, str, tuple[int, ...], str, str, str], int] = {}
    for f in facts:
        key = (f.pattern, f.scheme, f.convention, f.shape, f.declared, f.algorithm, _beside(f))
        alike[key] = alike.get(key, 0) + 1
    return tuple(
        ModuleGroup(
            pattern=pattern,
            scheme=scheme,
            convention=convention,
            shape=shape,
            declared=declared,
            algorithm=algorithm,
            modules=count,
            tensors=tensors,
        )
        for (pattern, scheme, convention, shape, declared, algorithm, tensors), count in sorted(alike.items())
    )
