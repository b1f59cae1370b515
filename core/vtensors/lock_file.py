"""The lock file: its records, written with a format version, and read strictly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from vtensors.errors import LockError
from vtensors.provenance import ShardProvenance
from vtensors.strict_json import MAX_BYTES, parse_json

LOCK_NAME = "vtensors.lock.json"
FORMAT = "vtensors-lock"
FORMAT_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@attrs.frozen(kw_only=True)
class ModuleGroup:
    """Modules that are alike. pattern: their name with every number as `*`; the rest as in `ModuleFacts`.

    tensors: role, dtype and shape of those beside the codes, in one line; None in a lock of an earlier vtensors.
    """

    pattern: str
    scheme: str
    convention: str
    shape: tuple[int, ...]
    declared: str
    algorithm: str
    modules: int
    tensors: str | None = None


@attrs.frozen(kw_only=True)
class Lock:
    """A checkpoint as it was.

    source: the repository, or the name of the directory or file. revision: as it was asked for.
    files: name -> SHA-256 of the files beside the shards, None where it did not exist; what could not be
    known is left out. modules: how many; modules_sha256: over name, scheme, convention, shape, declaration and
    tensors of each. groups: the same modules counted by kind, to name what moved.
    """

    source: str
    repo: str | None
    revision: str | None
    commit: str | None
    shards: tuple[ShardProvenance, ...]
    files: Mapping[str, str | None]
    modules: int
    modules_sha256: str
    groups: tuple[ModuleGroup, ...]
    written_by: str

    def to_json(self) -> dict[str, Any]:
        """The content of the lock file."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            **attrs.asdict(self),
            "shards": [attrs.asdict(shard) for shard in self.shards],
            "files": dict(self.files),
            "groups": [{**attrs.asdict(group), "shape": list(group.shape)} for group in self.groups],
        }


def write_lock(lock: Lock, path: Path) -> None:
    """Write the lock file, beside and renamed; a file that is there and no lock is not overwritten.

    Raises LockError for such a file, and where the file cannot be written.
    """
    if path.exists():
        read_lock(path)
    text = json.dumps(lock.to_json(), indent=1) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as cause:
        beside.unlink(missing_ok=True)
        raise LockError(
            f"the lock cannot be written: {cause.strerror or cause}",
            file=str(path),
            accepted="a file in a directory that this user may write to",
            fix="choose another place with --output",
        ) from cause


def read_lock(path: Path) -> Lock:
    """The lock in a file. Raises LockError for one that is absent, no lock, or of another format version."""
    try:
        # A pipe or device must not be opened: it may never end.
        if path.exists() and not path.is_file():
            raise LockError(
                "the lock is not a regular file",
                file=str(path),
                seen="a directory" if path.is_dir() else "a device or pipe",
                accepted="a file that `vtensors lock` wrote",
                fix=f"name a file in it, such as {path / LOCK_NAME}" if path.is_dir() else "name a file",
            )
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as cause:
        raise LockError(
            f"the lock cannot be read: {cause.strerror or cause}",
            file=str(path),
            accepted="a file that `vtensors lock` wrote",
            fix=f"write one with `vtensors lock SOURCE -o {path}`",
        ) from cause
    return parse_lock(data, file=str(path))


def parse_lock(data: bytes, *, file: str) -> Lock:
    """The lock that the bytes hold; file is named in messages. Errors as in `read_lock`."""
    value = parse_json(data, file=file, what="lock", error=LockError)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        seen = f"format {value.get('format')!r:.40}" if isinstance(value, dict) else type(value).__name__
        raise LockError(
            "the file is not a lock of vtensors",
            file=file,
            seen=seen,
            accepted=f'"format": "{FORMAT}"',
            fix="choose another file, or remove this one",
        )
    if value.get("version") != FORMAT_VERSION:
        raise LockError(
            "a lock of another format version",
            file=file,
            seen=repr(value.get("version"))[:40],
            accepted=str(FORMAT_VERSION),
            fix="write the lock again with this version of vtensors, or read it with that one",
        )
    return _Reader(file=file).lock(value)


@attrs.frozen(kw_only=True)
class _Reader:
    """Takes fields out of the JSON value; anything of another type is a LockError naming the field."""

    file: str

    def lock(self, value: Mapping[str, Any]) -> Lock:
        return Lock(
            source=self.text(value, "source"),
            repo=self.text_or_none(value, "repo"),
            revision=self.text_or_none(value, "revision"),
            commit=self.text_or_none(value, "commit"),
            shards=tuple(self.shard(entry) for entry in self.entries(value, "shards")),
            files=self.files(value),
            modules=self.number(value, "modules"),
            modules_sha256=self.digest(value, "modules_sha256"),
            groups=tuple(self.group(entry) for entry in self.entries(value, "groups")),
            written_by=self.text(value, "written_by"),
        )

    def shard(self, value: Mapping[str, Any]) -> ShardProvenance:
        return ShardProvenance(
            file=self.text(value, "file"),
            size=self.number(value, "size"),
            header_bytes=self.number(value, "header_bytes"),
            header_sha256=self.digest(value, "header_sha256"),
        )

    def group(self, value: Mapping[str, Any]) -> ModuleGroup:
        shape = value.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise self.wrong("shape", shape, "a list of sizes")
        return ModuleGroup(
            pattern=self.text(value, "pattern"),
            scheme=self.text(value, "scheme"),
            convention=self.text(value, "convention"),
            shape=tuple(shape),
            declared=self.text(value, "declared"),
            algorithm=self.text(value, "algorithm"),
            modules=self.number(value, "modules"),
            tensors=self.text_or_none(value, "tensors"),
        )

    def files(self, value: Mapping[str, Any]) -> dict[str, str | None]:
        found = value.get("files")
        if not isinstance(found, dict):
            raise self.wrong("files", found, "an object of file hashes")
        return {name: None if found[name] is None else self.digest(found, name) for name in found}

    def entries(self, value: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        found = value.get(key)
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise self.wrong(key, found, "a list of objects")
        return found

    def text(self, value: Mapping[str, Any], key: str) -> str:
        found = value.get(key)
        if not isinstance(found, str):
            raise self.wrong(key, found, "a string")
        return found

    def text_or_none(self, value: Mapping[str, Any], key: str) -> str | None:
        return None if value.get(key) is None else self.text(value, key)

    def number(self, value: Mapping[str, Any], key: str) -> int:
        found = value.get(key)
        if type(found) is not int or found < 0:
            raise self.wrong(key, found, "a number of zero or more")
        return found

    def digest(self, value: Mapping[str, Any], key: str) -> str:
        found = self.text(value, key)
        if not _SHA256.fullmatch(found):
            raise self.wrong(key, found, "a SHA-256 in hexadecimal")
        return found

    def wrong(self, key: str, found: object, accepted: str) -> LockError:
        return LockError(
            f"the lock's field '{key}' cannot be used",
            file=self.file,
            seen=repr(found)[:60],
            accepted=accepted,
            fix="write the lock again; it is not meant to be edited",
        )
