"""What a Hub cache folder holds of one repository: refs are followed, folders are never searched for "the
newest".
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vtensors.counts import counted
from vtensors.errors import CheckpointError, HubError
from vtensors.provenance import REPO_FOLDER_PREFIX
from vtensors.shard_files import SUFFIX, listed
from vtensors.snapshot import select_local

DEFAULT_REVISION = "main"
CONFIG_NAME = "config.json"

_PLAIN_NAME = re.compile(r"\w[\w.\-]*")


def repo_folder(cache: Path, repo: str) -> Path:
    """The cache's folder of the model `org/name`."""
    return cache / (REPO_FOLDER_PREFIX + repo.replace("/", "--"))


def cached_commit(folder: Path, revision: str | None) -> str | None:
    """The commit that a branch, tag (by `refs/<revision>`) or commit hash stands for, None where the cache
    has none.

    revision: None means `main`. Raises HubError for a ref file that does not hold a commit.
    """
    wanted = revision or DEFAULT_REVISION
    try:
        commit = (folder / "refs" / wanted).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        # Not a branch or tag that the cache knows; a commit hash is its own snapshot folder.
        return wanted if _PLAIN_NAME.fullmatch(wanted) and (folder / "snapshots" / wanted).is_dir() else None
    if not _PLAIN_NAME.fullmatch(commit):
        raise HubError(
            f"the cache's refs/{wanted} does not hold a commit hash",
            file=str(folder),
            seen=commit[:80],
            accepted="40 hexadecimal digits",
            fix="delete that file and download the repository again",
        )
    return commit


def complete_snapshot(folder: Path, revision: str | None) -> Path | None:
    """The snapshot directory of the revision if its configuration and every shard are there, else None."""
    commit = cached_commit(folder, revision)
    if commit is None:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if what_is_missing(snapshot) is None else None


def what_is_missing(snapshot: Path) -> str | None:
    """Why a snapshot directory cannot be opened as a checkpoint, None if nothing is missing."""
    if not snapshot.is_dir():
        return "the snapshot folder does not exist"
    if not (snapshot / CONFIG_NAME).is_file():
        return f"no {CONFIG_NAME}"
    try:
        select_local(snapshot)
    except CheckpointError as reason:
        return reason.problem
    return None


def require_snapshot(folder: Path, revision: str | None, *, repo: str) -> Path:
    """The complete snapshot directory of the revision.

    Raises HubError, naming every cached snapshot and what it holds, if it is absent or incomplete. Files of
    another snapshot never fill in.
    """
    found = complete_snapshot(folder, revision)
    if found is not None:
        return found
    wanted = revision or DEFAULT_REVISION
    commit = cached_commit(folder, revision)
    if commit is None:
        problem = f"revision {wanted!r} of {repo} is not in the cache"
    else:
        reason = what_is_missing(folder / "snapshots" / commit)
        problem = f"the cached snapshot {commit} of {repo} (revision {wanted!r}) is incomplete: {reason}"
    raise HubError(
        problem,
        file=str(folder),
        seen=describe_cache(folder) or "no snapshot of this repository",
        accepted="a snapshot with config.json and all of its shards; files of two snapshots are never mixed",
        fix=f"download the revision (hf download {repo}), or ask for a complete one as {repo}@COMMIT",
    )


def describe_cache(folder: Path) -> str:
    """Every cached snapshot with the refs that point to it and what it holds; empty if there is none."""
    refs = _refs(folder)
    snapshots = _folder_names(folder / "snapshots")
    parts = []
    for commit in snapshots:
        pointing = "".join(f" (refs/{ref})" for ref, target in refs.items() if target == commit)
        parts.append(f"snapshot {commit}{pointing}: {_holds(folder / 'snapshots' / commit)}")
    parts += [
        f"refs/{ref} points to {target}, which is not there"
        for ref, target in refs.items()
        if target not in snapshots
    ]
    return "; ".join(parts)


def _holds(snapshot: Path) -> str:
    names = sorted(os.listdir(snapshot))
    broken = [name for name in names if not (snapshot / name).exists()]
    shards = [name for name in names if name.endswith(SUFFIX) and name not in broken]
    others = [name for name in names if name not in shards and name not in broken]
    parts = [
        counted(len(shards), "shard") if len(shards) > 1 else shards[0] if shards else "no .safetensors file"
    ]
    if others:
        parts.append(listed(others))
    if broken:
        parts.append(f"broken links: {listed(broken)}")
    return f"{', '.join(parts)} ({'incomplete' if what_is_missing(snapshot) else 'complete'})"


def _refs(folder: Path) -> dict[str, str]:
    root = folder / "refs"
    found = {}
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.is_file():
            found[path.relative_to(root).as_posix()] = path.read_text(
                encoding="utf-8", errors="replace"
            ).strip()
    return found


def _folder_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
