"""The content of files against the hashes under which the Hub stored them.

In a Hub cache each file of a snapshot is a link into `blobs/`, and the blob's name is the file's hash: SHA-256
of large files (64 hexadecimal digits), git's SHA-1 of `blob <length>\\0` and the content of small ones (40).
A folder that was downloaded with `--local-dir` keeps the same hash in
`.cache/huggingface/download/<file>.metadata`, second line (huggingface_hub's guide on local folders).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from vtensors.verification.findings import Finding, finding

_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_BLOCK = 4 << 20


@attrs.frozen(kw_only=True)
class HashedFile:
    """name: of the file. path: where it is. expected: its hash by the Hub, None where nothing says it."""

    name: str
    path: Path
    expected: str | None


def hashed_files(root: Path) -> list[HashedFile]:
    """The files of a checkpoint directory (or of one file) with the hashes that they should have.

    Hidden files and folders are left out.
    """
    if root.is_file():
        return [HashedFile(name=root.name, path=root, expected=_expected(root.parent, root))]
    found = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            found.append(HashedFile(name=name, path=path, expected=_expected(root, path)))
    return found


def hash_findings(
    files: list[HashedFile], threads: int, progress: Callable[[int], None]
) -> Iterator[Finding]:
    """`content-differs` and `unknown-hash`, in the order of the files. progress: told of bytes read."""
    known = [file for file in files if file.expected is not None]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        digests = dict(
            zip(known, pool.map(lambda f: _digest(f.path, f.expected or "", progress), known), strict=True)
        )
    for file in files:
        if file.expected is None:
            yield finding("unknown-hash", file.name, seen="the file is no blob of a Hub cache")
        elif digests[file] != file.expected:
            yield finding(
                "content-differs",
                file.name,
                seen=digests[file],
                expected=f"{file.expected} (the blob's name)",
            )


def _digest(path: Path, expected: str, progress: Callable[[int], None]) -> str:
    """SHA-256 where the expected hash has its length, else git's blob SHA-1; the error's text if unreadable."""
    try:
        with path.open("rb", buffering=0) as stream:
            digest = hashlib.sha256()
            if len(expected) == 40:
                digest = hashlib.sha1(b"blob %d\0" % os.fstat(stream.fileno()).st_size, usedforsecurity=False)
            block = bytearray(_BLOCK)
            while count := stream.readinto(block):
                digest.update(memoryview(block)[:count])
                progress(count)
            return digest.hexdigest()
    except OSError as cause:
        return f"the file cannot be read: {cause.strerror or cause}"


def _expected(root: Path, path: Path) -> str | None:
    # A blob may itself be a link on to a store that all repositories share: the first name counts.
    place = path
    while place.is_symlink():
        place = Path(os.path.normpath(place.parent / os.readlink(place)))
        if place.parent.name == "blobs" and _HASH.fullmatch(place.name):
            return place.name
    metadata = root / ".cache" / "huggingface" / "download" / f"{path.relative_to(root).as_posix()}.metadata"
    try:
        lines = metadata.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return lines[1] if len(lines) > 1 and _HASH.fullmatch(lines[1]) else None
