"""Bytes of shards by `pread`, into buffers that are used again: no mapping, no copy of a whole tensor."""

from __future__ import annotations

import os
import threading
from types import TracebackType

import attrs

from vtensors.errors import CheckpointError
from vtensors.header import FileIdentity
from vtensors.snapshot import Snapshot


@attrs.define
class ShardBytes:
    """Reads ranges of a local snapshot's files; used by several threads at once.

    A file that is not the one whose header was read, or that ends too early, is a CheckpointError.
    """

    snapshot: Snapshot
    _descriptors: dict[str, int] = attrs.field(factory=dict, init=False, repr=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

    def read_into(self, file: str, begin: int, view: memoryview) -> None:
        """Fill the view with the file's bytes from `begin` on."""
        descriptor, done = self._descriptor(file), 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], begin + done)
            except OSError as cause:
                raise CheckpointError(
                    f"the file cannot be read: {cause.strerror or cause}",
                    file=file,
                    fix="make it readable for this user (permissions, mount), or download the file again",
                ) from cause
            if count == 0:
                raise CheckpointError(
                    "the file ends too early: it changed while it was read, or its end is missing",
                    file=file,
                    seen=f"{begin + done} bytes",
                    accepted=f"{begin + len(view)} bytes at least",
                    fix="download the file again, or wait until nothing writes to it",
                )
            done += count

    def read(self, file: str, begin: int, end: int) -> bytearray:
        """The file's bytes from begin to end, in memory of their own."""
        data = bytearray(end - begin)
        self.read_into(file, begin, memoryview(data))
        return data

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> ShardBytes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = self._open(file)
            return self._descriptors[file]

    def _open(self, file: str) -> int:
        path = self.snapshot.shard_path(file)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise CheckpointError(
                f"the file cannot be read: {cause.strerror or cause}",
                file=file,
                fix="make it readable for this user (permissions, mount), or download the file again",
            ) from cause
        before, now = self.snapshot.shards[file].identity, FileIdentity.of(os.fstat(descriptor))
        if before != now:
            os.close(descriptor)
            raise CheckpointError(
                "file changed since its header was read",
                file=file,
                seen=f"{now}",
                accepted=f"{before}",
                fix="verify again once nothing writes to it",
            )
        return descriptor
