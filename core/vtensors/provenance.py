"""Where a checkpoint came from: what was asked for, the commit that answered, and a hash per header."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

# The Hub cache's layout: models--<org>--<name>/{refs,blobs,snapshots/<commit>} (huggingface_hub's cache
# guide).
REPO_FOLDER_PREFIX = "models--"
COMMIT = re.compile(r"[0-9a-f]{40}")


@attrs.frozen(kw_only=True)
class ShardProvenance:
    """One shard: size of the file, length of its header in bytes, SHA-256 of these header bytes in
    hexadecimal."""

    file: str
    size: int
    header_bytes: int
    header_sha256: str


@attrs.frozen(kw_only=True)
class Provenance:
    """Where a checkpoint came from.

    source: the path or `repo[@revision]` as the user gave it.
    repo: `org/name` on the Hub, None for a folder that is not in a Hub cache.
    revision: branch, tag or commit that was asked for, None where none was.
    commit: the commit hash that was opened, None where unknown.
    shards: in the order of their names; empty until the headers have been read.
    """

    source: str
    repo: str | None = None
    revision: str | None = None
    commit: str | None = None
    shards: tuple[ShardProvenance, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The same facts as JSON values."""
        return {**attrs.asdict(self), "shards": [attrs.asdict(shard) for shard in self.shards]}


def local_provenance(source: str, path: Path) -> Provenance:
    """Provenance of a local path; inside of a Hub cache the repo and commit are read off the folder names."""
    folder = path.resolve() if path.is_dir() else path.parent.resolve()
    repo_folder = folder.parent.parent
    if folder.parent.name != "snapshots" or not repo_folder.name.startswith(REPO_FOLDER_PREFIX):
        return Provenance(source=source)
    return Provenance(
        source=source,
        repo=repo_folder.name.removeprefix(REPO_FOLDER_PREFIX).replace("--", "/", 1),
        commit=folder.name if COMMIT.fullmatch(folder.name) else None,
    )
