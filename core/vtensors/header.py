"""A safetensors header: read by its own length, checked against the file, turned into `TensorInfo` records.

Layout (safetensors format description): 8 bytes little-endian header length N, N bytes JSON, then the data
section that the tensors' `data_offsets` cover without a gap.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from vtensors.counts import counted
from vtensors.errors import CheckpointError
from vtensors.header_entries import check_layout, read_entries, read_metadata
from vtensors.strict_json import parse_json
from vtensors.tensors import TensorInfo

# safetensors 0.8 refuses longer headers (MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
# A header needs four levels: the object, a tensor, its shape; one is spare for a clear message.
MAX_HEADER_DEPTH = 4
# A tensor has three brackets and some six commas: `MAX_TENSORS` of them pass.
MAX_HEADER_VALUES = 3_000_000
# Enough to know a git-LFS pointer, which is shorter than 200 bytes.
PREFIX_BYTES = 1024

_LFS_OPENING = b"version https://git-lfs"


@attrs.frozen(kw_only=True)
class FileIdentity:
    """What tells that a file on disk is still the one whose header was read."""

    size: int
    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity in the result of `os.stat` or `os.fstat`."""
        return cls(size=status.st_size, inode=status.st_ino, mtime_ns=status.st_mtime_ns)


@attrs.frozen(kw_only=True)
class ShardHeader:
    """One shard's validated header.

    tensors: in the order of the header.
    metadata: the `__metadata__` strings, empty where there are none.
    header_bytes: 8 + length of the JSON; the data section begins here.
    sha256: hexadecimal digest of these header bytes.
    file_size: bytes of the whole file.
    identity: of the local file; None for a header that was read over HTTP.
    """

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    header_bytes: int
    sha256: str
    file_size: int
    identity: FileIdentity | None = None


def header_length(file: str, prefix: bytes, file_size: int) -> int:
    """Bytes of the header with its 8 length bytes.

    prefix: the file's first bytes, at least `min(file_size, 8)`; with `PREFIX_BYTES` a git-LFS pointer is
    known. Raises CheckpointError for a file that is empty, a git-LFS pointer, or whose header cannot fit.
    """
    if file_size == 0:
        raise CheckpointError(
            "the file is empty",
            file=file,
            seen="0 bytes",
            fix="download it again; the download did not begin",
        )
    if prefix.startswith(_LFS_OPENING[: max(8, len(prefix))]):
        raise CheckpointError(
            "the file is a git-LFS pointer, the weights themselves were not fetched",
            file=file,
            seen=f"{file_size} bytes of text",
            fix="run `git lfs pull` in the repository, or download the file",
        )
    if file_size < 8 or len(prefix) < 8:
        raise CheckpointError(
            "the file is too short for a safetensors header",
            file=file,
            seen=counted(file_size, "byte"),
            accepted="8 length bytes and a JSON header at least",
            fix="download it again",
        )
    length = int.from_bytes(prefix[:8], "little")
    if length > file_size - 8:
        raise CheckpointError(
            "the header would be longer than the file",
            file=file,
            seen=f"a header of {length} bytes in a file of {counted(file_size, 'byte')}, which begins {prefix[:8]!r}",
            accepted=f"at most {counted(file_size - 8, 'byte')}",
            fix="the file is cut off inside of its header or is not a safetensors file: download it again",
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            "the header is too long",
            file=file,
            seen=f"{length} bytes",
            accepted=f"at most {MAX_HEADER_BYTES} bytes, as safetensors itself",
            fix="download the file again; if it was published so, its writer made a header that is not safetensors",
        )
    return 8 + length


def parse_header(file: str, raw: bytes, file_size: int) -> ShardHeader:
    """The validated header of one shard.

    file: name that messages and `TensorInfo.file` carry.
    raw: the file's first bytes, up to the end of the header at least; more is ignored.
    file_size: bytes of the whole file.

    Raises CheckpointError, each with its own message, for: an empty file, a git-LFS pointer, a header longer
    than the file, a header that is not JSON, an entry that is malformed, offsets that overlap or leave a gap,
    byte counts that contradict dtype and shape, missing bytes (an incomplete download) and trailing bytes.
    A dtype that is not in `DTYPE_BITS` is kept as written; its byte count cannot be checked.
    """
    total = header_length(file, raw[:PREFIX_BYTES], file_size)
    if len(raw) < total:
        raise CheckpointError(
            "the header could not be read whole",
            file=file,
            seen=f"{len(raw)} of {total} bytes",
            accepted="the whole header",
            fix="try it again; the file is read or changed by something else",
        )
    head = raw if len(raw) == total else raw[:total]
    content = parse_json(
        head[8:],
        file=file,
        what="header",
        max_depth=MAX_HEADER_DEPTH,
        max_bytes=MAX_HEADER_BYTES,
        max_values=MAX_HEADER_VALUES,
    )
    if not isinstance(content, dict):
        raise CheckpointError(
            "the header is not a JSON object",
            file=file,
            seen=type(content).__name__,
            accepted="a JSON object of tensors",
            fix="download the file again; if it was published so, its writer made a header that is not safetensors",
        )
    metadata = read_metadata(file, content.pop("__metadata__", None))
    tensors = read_entries(file, content, total)
    check_layout(file, tensors, total, file_size)
    return ShardHeader(
        tensors=tensors,
        metadata=MappingProxyType(metadata),
        header_bytes=total,
        sha256=hashlib.sha256(head).hexdigest(),
        file_size=file_size,
    )


def read_header(path: Path, name: str) -> ShardHeader:
    """The validated header of the file at `path`, with the file's identity; no data byte is read.

    name: what messages and `TensorInfo.file` call the file. Raises CheckpointError as `parse_header` does,
    and for a path that cannot be opened or is not a regular file.
    """
    try:
        # A pipe or device under the name of a shard must not be opened: opening may wait for ever.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(
                "not a regular file",
                file=name,
                seen="a directory, device or pipe",
                accepted="a file of weights",
                fix="remove it, or put the file in its place",
            )
        with path.open("rb", buffering=0) as stream:
            identity = FileIdentity.of(os.fstat(stream.fileno()))
            prefix = stream.read(PREFIX_BYTES)
            total = header_length(name, prefix, identity.size)
            raw = (
                prefix
                if len(prefix) >= total
                else prefix + _read_exactly(stream.fileno(), total, len(prefix))
            )
    except OSError as cause:
        raise CheckpointError(
            f"the file cannot be read: {cause.strerror or cause}",
            file=name,
            fix="make it readable for this user (permissions, mount), or download the file again",
        ) from cause
    return attrs.evolve(parse_header(name, raw, identity.size), identity=identity)


def _read_exactly(descriptor: int, end: int, begin: int) -> bytes:
    parts = []
    while begin < end:
        part = os.pread(descriptor, end - begin, begin)
        if not part:  # the file became shorter; parse_header says what is missing
            break
        parts.append(part)
        begin += len(part)
    return b"".join(parts)
