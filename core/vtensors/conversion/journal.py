"""What of an interrupted conversion is finished: one JSON line per file, each checked before it is believed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import attrs

from vtensors.strict_json import parse_json

JOURNAL_NAME = ".vtensors-journal.jsonl"
_CHUNK = 8 << 20


@attrs.define
class Journal:
    """The journal of one partial directory. finished: file -> (size, sha256)."""

    path: Path
    fingerprint: str
    finished: dict[str, tuple[int, str]] = attrs.field(factory=dict, init=False)

    def load(self) -> None:
        """Believe the lines of an earlier run of the same plan; those of another plan are thrown away."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        records = [record for line in lines if (record := _record(line)) is not None]
        if records and records[0].get("fingerprint") == self.fingerprint:
            for record in records[1:]:
                file, size, digest = record.get("file"), record.get("size"), record.get("sha256")
                if isinstance(file, str) and isinstance(size, int) and isinstance(digest, str):
                    self.finished[file] = (size, digest)
            return
        self.path.write_bytes(json.dumps({"fingerprint": self.fingerprint}).encode() + b"\n")

    def add(self, file: str, size: int, digest: str) -> None:
        """Record a file that is complete and on the disk."""
        self.finished[file] = (size, digest)
        line = json.dumps({"file": file, "size": size, "sha256": digest}).encode() + b"\n"
        with self.path.open("ab") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())

    def holds(self, path: Path, expected_size: int, progress: Callable[[int], None]) -> bool:
        """Whether the file is finished: recorded, of the planned size, and of the recorded content."""
        recorded = self.finished.get(path.name)
        if recorded is None or recorded[0] != expected_size:
            return False
        try:
            if path.is_symlink() or path.stat().st_size != expected_size:
                return False
            return file_sha256(path, progress) == recorded[1]
        except OSError:
            return False


def file_sha256(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """Hexadecimal digest of the file's content. progress: called with the bytes of each step."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while data := stream.read(_CHUNK):
            digest.update(data)
            progress(len(data))
    return digest.hexdigest()


def _record(line: bytes) -> dict[str, object] | None:
    """A line's object; None for the last line of a run that was killed while it wrote."""
    from vtensors.errors import CheckpointError

    try:
        value = parse_json(line, file=JOURNAL_NAME, what="line")
    except CheckpointError:
        return None
    return value if isinstance(value, dict) else None
