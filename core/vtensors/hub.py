"""From what a user names to a checkpoint: a path, a cached snapshot, headers over HTTP, or a download.

huggingface_hub is imported only here and in `remote`, and only once a source is not a local path. Its
settings hold: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_HUB_CACHE and the login token.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

import attrs

from vtensors.errors import CheckpointError, HubError, RequestError
from vtensors.hub_cache import complete_snapshot, describe_cache, repo_folder, require_snapshot
from vtensors.provenance import REPO_FOLDER_PREFIX, Provenance, local_provenance
from vtensors.remote import list_repository, network_errors, network_refusal, open_remote, select_remote
from vtensors.shard_files import INDEX_NAME
from vtensors.snapshot import Snapshot, open_snapshot

# The Hub's own rule for names: letters, digits, `_`, `-` and `.`, without `--` and `..`.
_REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_REVISION = re.compile(r"[\w.\-]+(/[\w.\-]+)*")
# Files beside the shards that loading may need: configurations, chat templates, tokenizers.
_SIDE_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


@attrs.frozen(kw_only=True)
class Location:
    """Where a source was found. root: local directory or file; None if only the Hub has it."""

    root: Path | None
    provenance: Provenance


def open_source(
    source: str | Path,
    revision: str | None = None,
    *,
    download: bool = False,
    refuse_stray: bool = False,
    offline: bool | None = None,
) -> Snapshot:
    """The checkpoint that `source` names, its headers read and validated.

    download: fetch the weights of a repository that is not cached; otherwise only its headers are fetched.
    Other arguments and errors as in `resolve` and `open_snapshot`.
    """
    location = resolve(source, revision, offline=offline)
    if location.root is not None:
        return open_snapshot(location.root, location.provenance, refuse_stray=refuse_stray)
    wanted = location.provenance
    if wanted.repo is None:
        raise CheckpointError(
            "there is no such checkpoint",
            file=wanted.source,
            seen="no such file or directory",
            accepted="a directory or a .safetensors file",
            fix="correct the path",
        )
    try:
        if not download:
            return open_remote(wanted.repo, wanted.revision, source=wanted.source, refuse_stray=refuse_stray)
        root = download_snapshot(wanted.repo, wanted.revision)
    except HubError as error:
        cached = describe_cache(repo_folder(_cache(), wanted.repo))
        if not cached or error.seen:
            raise
        raise HubError(error.problem, file=error.file, seen=f"cached: {cached}", fix=error.fix) from error
    provenance = attrs.evolve(wanted, commit=root.name)
    return open_snapshot(root, provenance, refuse_stray=refuse_stray)


def resolve(source: str | Path, revision: str | None = None, *, offline: bool | None = None) -> Location:
    """Where the checkpoint `source` lies.

    source: an existing path (a directory, a `.safetensors` file, a repository's folder in a Hub cache), or
        `org/name[@revision]`.
    revision: branch, tag or commit; None means what stands behind `@`, else `main`.
    offline: use the cache alone; None follows HF_HUB_OFFLINE.

    A revision that is completely cached is taken from the cache without asking the Hub, so that a branch
    moves only when it is downloaded again. Raises HubError for a name that is neither, and offline for a
    snapshot that is absent or incomplete, naming what each cached snapshot holds; RequestError for two
    different revisions and for a source that is neither text nor a path.
    """
    if not isinstance(source, str | Path):
        raise RequestError(
            "this names no checkpoint",
            seen=repr(source)[:80],
            accepted="a str or pathlib.Path: a path, or org/name[@revision]",
            fix="pass the path or the name as text",
        )
    path = _existing_path(source)
    if path is not None:
        return _resolve_path(str(source), path, revision)
    repo, revision = split_source(source, revision)
    folder = repo_folder(_cache(), repo)
    provenance = Provenance(source=str(source), repo=repo, revision=revision)
    root = complete_snapshot(folder, revision)
    if root is None and (_is_offline() if offline is None else offline):
        root = require_snapshot(folder, revision, repo=repo)
    if root is not None:
        provenance = attrs.evolve(provenance, commit=root.name)
    return Location(root=root, provenance=provenance)


def split_source(source: str | Path, revision: str | None) -> tuple[str, str | None]:
    """Repo and revision of `org/name[@revision]`.

    Raises HubError for a path that does not exist or a malformed name, RequestError for two different
    revisions.
    """
    text = str(source)
    repo, at, named = text.partition("@")
    if isinstance(source, Path) or not _REPO.fullmatch(repo) or text.endswith(".safetensors"):
        raise HubError(
            "no such file or directory, and not the name of a repository",
            file=text,
            seen=repr(text),
            accepted="an existing path, or org/name[@revision]",
            fix="correct the path or the name",
        )
    if at and revision is not None and revision != named:
        raise RequestError(
            "two different revisions are asked for",
            file=text,
            seen=f"{named!r} in the name and {revision!r} beside it",
            accepted="one revision, in one of the two places",
            fix="leave one of them out",
        )
    wanted = named if at else revision
    if wanted is not None and (not _REVISION.fullmatch(wanted) or ".." in wanted):
        raise HubError(
            "not a revision",
            file=text,
            seen=repr(wanted),
            accepted="a branch, a tag or a commit hash",
            fix="correct the revision",
        )
    return repo, wanted


def download_snapshot(repo: str, revision: str | None) -> Path:
    """Directory of the repository's snapshot in the Hub cache after downloading what loading needs.

    Downloaded are exactly the shards that the index names (see `select_shards`) and the configurations and
    tokenizer files beside them. Raises HubError if the Hub cannot be reached, refuses, or the branch moves
    meanwhile.
    """
    from huggingface_hub import snapshot_download

    listing = list_repository(repo, revision)
    selection = select_remote(listing)
    side = [
        name
        for name in listing.names
        if name.endswith(_SIDE_SUFFIXES) and (name == INDEX_NAME or not name.endswith(".index.json"))
    ]
    try:
        root = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[glob.escape(name) for name in (*selection.files, *side)],
            )
        )
    except network_errors() as cause:
        raise network_refusal(repo, revision, cause) from cause
    if root.name != listing.commit:
        raise HubError(
            "the revision moved while it was downloaded",
            file=repo,
            seen=f"{listing.commit} at first, then {root.name}",
            fix="run it again, or name the commit",
        )
    return root


def _existing_path(source: str | Path) -> Path | None:
    if not str(source):
        return None  # Path("") would be the current directory
    try:
        path = Path(source).expanduser()
        # A broken link is a path too: opening it says where it leads.
        return path if path.exists() or path.is_symlink() else None
    except (OSError, RuntimeError):  # too long a name, or the home of an unknown user
        return None


def _resolve_path(source: str, path: Path, revision: str | None) -> Location:
    if path.name.startswith(REPO_FOLDER_PREFIX) and (path / "snapshots").is_dir():
        repo = path.name.removeprefix(REPO_FOLDER_PREFIX).replace("--", "/", 1)
        root = require_snapshot(path, revision, repo=repo)
        return Location(root=root, provenance=attrs.evolve(local_provenance(source, root), revision=revision))
    if revision is not None:
        raise RequestError(
            "a local path has no revisions", file=source, seen=repr(revision), fix="leave the revision out"
        )
    return Location(root=path, provenance=local_provenance(source, path))


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
