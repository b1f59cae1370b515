"""Headers of a repository on the Hub, read by HTTP range requests: no weight is downloaded to look at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import attrs

from vtensors.errors import HubError
from vtensors.header import ShardHeader, header_length, parse_header
from vtensors.provenance import Provenance
from vtensors.shard_files import INDEX_NAME, ShardSelection, select_shards
from vtensors.snapshot import Snapshot, assemble
from vtensors.strict_json import MAX_BYTES

# The small files that tell what the tensors are; everything else needs a download.
SIDE_FILES = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
)
# Read at once in the hope that the header is no longer; a longer one costs a second request for its rest.
FIRST_READ_BYTES = 65_536

_CHUNK_BYTES = 65_536
_PARALLEL_REQUESTS = 8
_TIMEOUT_SECONDS = 30.0


@attrs.frozen(kw_only=True)
class Listing:
    """A repository at one commit. names: its files, those in sub-folders left out."""

    repo: str
    commit: str
    names: tuple[str, ...]


def open_remote(
    repo: str, revision: str | None, *, source: str | None = None, refuse_stray: bool = False
) -> Snapshot:
    """The repository's snapshot without its weights: `root` is None and `side_files` holds the
    configurations.

    The commit is resolved first; every further request names it, so that files of two commits are never
    mixed. Raises HubError for a repository, revision or server that cannot be read, CheckpointError as
    `open_snapshot`.
    """
    listing = list_repository(repo, revision)
    selection = select_remote(listing)
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        headers = list(pool.map(lambda name: fetch_header(listing, name), selection.files))
    side_files = {name: fetch_file(listing, name) if name in listing.names else None for name in SIDE_FILES}
    return assemble(
        None,
        Provenance(source=source or repo, repo=repo, revision=revision, commit=listing.commit),
        selection,
        dict(zip(selection.files, headers, strict=True)),
        refuse_stray=refuse_stray,
        side_files=MappingProxyType(side_files),
    )


def list_repository(repo: str, revision: str | None) -> Listing:
    """Commit and files of the revision (None: `main`), from the Hub's API. Raises HubError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo, revision=revision or "main")
    except network_errors() as cause:
        raise network_refusal(repo, revision, cause) from cause
    if not info.sha:
        raise HubError(
            "the Hub does not say which commit this is",
            file=repo,
            seen=repr(revision),
            accepted="an answer with a commit hash",
            fix="try it again, or check HF_ENDPOINT",
        )
    names = [sibling.rfilename for sibling in info.siblings or ()]
    return Listing(repo=repo, commit=info.sha, names=tuple(sorted(name for name in names if "/" not in name)))


def select_remote(listing: Listing) -> ShardSelection:
    """The shards of the repository, by its index where it has one; see `select_shards`."""
    index = fetch_file(listing, INDEX_NAME) if INDEX_NAME in listing.names else None
    return select_shards(f"{listing.repo}@{listing.commit}", listing.names, index)


def fetch_file(listing: Listing, name: str) -> bytes:
    """Content of a small file. Raises HubError if it is longer than `MAX_BYTES` or cannot be read."""
    data, _ = _fetch(listing, name, 0, MAX_BYTES + 1, ranged=False)
    if len(data) > MAX_BYTES:
        raise HubError(
            "the file is too long for a configuration",
            file=f"{listing.repo}/{name}",
            seen="a longer one",
            accepted=f"at most {MAX_BYTES} bytes",
            fix="this is no configuration of a model: check the repository",
        )
    return data


def fetch_header(listing: Listing, name: str) -> ShardHeader:
    """A shard's validated header, by its own length: one range request, two for a long header.

    Raises HubError for the transfer, CheckpointError for the header.
    """
    raw, size = _fetch(listing, name, 0, FIRST_READ_BYTES, ranged=True)
    total = header_length(name, raw, size)
    if len(raw) < total:
        rest, _ = _fetch(listing, name, len(raw), total, ranged=True)
        raw += rest
    return parse_header(name, raw, size)


def network_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub's calls raise for the network, the server's answer and the cache."""
    from huggingface_hub import errors

    # The module also holds the error root of the HTTP client in use, which differs between versions.
    found = (value for value in vars(errors).values() if isinstance(value, type))
    # ValueError: an HF_ENDPOINT that is no address.
    return (OSError, ValueError, *(value for value in found if issubclass(value, Exception)))


def network_refusal(repo: str, revision: str | None, cause: Exception) -> HubError:
    """The error that says in our words why the Hub did not give the repository."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = f"{repo}@{revision}" if revision else repo
    if isinstance(cause, GatedRepoError):
        return HubError(
            "access to this repository must be granted",
            file=wanted,
            seen="a gated repository",
            accepted="a token of an account with access",
            fix="accept its terms, log in (hf auth login)",
        )
    if isinstance(cause, RepositoryNotFoundError):
        return HubError(
            "no such repository, or it is private",
            file=wanted,
            seen="HTTP status 404 or 401",
            accepted="a local path, or org/name of a repository that this account may read",
            fix="check the name, log in (hf auth login)",
        )
    if isinstance(cause, RevisionNotFoundError):
        return HubError(
            "the repository has no such revision",
            file=wanted,
            seen=wanted,
            accepted="a branch, a tag or a commit hash of it",
            fix="look at its branches and tags, or leave the revision out",
        )
    if isinstance(cause, OfflineModeIsEnabled):
        return HubError(
            "not in the cache, and HF_HUB_OFFLINE is set",
            file=wanted,
            seen="HF_HUB_OFFLINE",
            accepted="a repository that is in the cache, or a local path",
            fix="unset HF_HUB_OFFLINE",
        )
    return HubError(
        f"{constants.ENDPOINT} cannot be reached or answers with an error: {type(cause).__name__}: {cause}",
        file=wanted,
        fix="check the connection and HF_ENDPOINT, or give a local path",
    )


def _fetch(listing: Listing, name: str, begin: int, end: int, *, ranged: bool) -> tuple[bytes, int]:
    """Bytes begin..end of a file (fewer at its end) and the file's size (0 where a whole file has none
    stated).
    """
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    api = HfApi()
    url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=api.endpoint)
    # Compressed answers would make the range count other bytes.
    headers = {**build_hf_headers(token=api.token), "accept-encoding": "identity"}
    if ranged:
        headers["range"] = f"bytes={begin}-{end - 1}"
    where = f"{listing.repo}/{name}"
    try:
        with _streamed(url, headers) as (status, answered, chunks):
            if status == 416:  # an empty file has no byte that a range could name
                return b"", _total_size(where, answered)
            if status not in (200, 206):
                raise HubError(
                    _status_text(status),
                    file=where,
                    seen=f"HTTP status {status} for {url}",
                    accepted="HTTP status 206",
                    fix="try it again later, or check HF_ENDPOINT",
                )
            partial = status == 206
            size = _total_size(where, answered) if partial else int(answered.get("content-length", 0))
            # A server that ignores the range sends the file from its begin: skip, and hang up after the end.
            data = _take(chunks, 0 if partial else begin, end - begin)
    except network_errors() as cause:
        raise network_refusal(listing.repo, listing.commit, cause) from cause
    expected = min(end, size) - begin
    if ranged and len(data) != expected:
        raise HubError(
            "the server sent too few bytes",
            file=where,
            seen=f"{len(data)} of {expected}",
            accepted="all of them",
            fix="try it again",
        )
    return data, size


def _take(chunks: Iterable[bytes], skip: int, count: int) -> bytes:
    taken = bytearray()
    for chunk in chunks:
        taken += chunk[skip:]
        skip = max(0, skip - len(chunk))
        if len(taken) >= count:
            break
    return bytes(taken[:count])


def _total_size(where: str, answered: Any) -> int:
    # RFC 9110 section 14.4: `bytes 0-99/1234`, or `bytes */1234` for a range that cannot be satisfied.
    text = str(answered.get("content-range", ""))
    total = text.rpartition("/")[2]
    if not total.isdecimal():
        raise HubError(
            "the server does not say how long the file is",
            file=where,
            seen=f"content-range {text!r}",
            accepted="content-range: bytes first-last/length",
            fix="try it again, or check HF_ENDPOINT",
        )
    return int(total)


def _status_text(status: int) -> str:
    if status in (401, 403):
        return "the server refuses access: log in (hf auth login), accept the repository's terms"
    return "the server does not have the file" if status == 404 else "the server answers with an error"


@contextmanager
def _streamed(url: str, headers: dict[str, str]) -> Iterator[tuple[int, Any, Iterator[bytes]]]:
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    session: Any = get_session()
    if callable(getattr(session, "stream", None)):
        request = session.stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_SECONDS)
        with request as response:
            yield response.status_code, response.headers, response.iter_bytes(_CHUNK_BYTES)
    else:  # huggingface_hub before 1.0 gives a requests.Session
        with session.get(url, headers=headers, stream=True, timeout=_TIMEOUT_SECONDS) as response:
            yield response.status_code, response.headers, response.iter_content(_CHUNK_BYTES)
