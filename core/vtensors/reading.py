"""The stored bytes of tensors: mapped without a copy, or read into memory of their own."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref

import attrs

from vtensors.errors import CheckpointError, RequestError
from vtensors.header import FileIdentity
from vtensors.snapshot import Snapshot
from vtensors.tensors import TensorInfo

# One read call moves less than 2 GiB on Linux and macOS.
_READ_BYTES = 1 << 30


@attrs.frozen(kw_only=True)
class _OpenShard:
    descriptor: int
    mapping: mmap.mmap | None


@attrs.define
class TensorReader:
    """Gives the stored bytes of a local snapshot's tensors; opens each shard on first use.

    snapshot: local, as `open_snapshot` made it.
    mmap: False (`VT_MMAP=0`) makes `bytes_view` read instead of mapping.

    Size, inode and mtime of a shard are compared with those seen when its header was read, at every use: a
    file that changed is a CheckpointError. A mapping cannot guard bytes that are touched after the check;
    `read_copy` can.
    """

    snapshot: Snapshot
    mmap: bool = attrs.field(default=True, kw_only=True, on_setattr=attrs.setters.frozen)
    _shards: dict[str, _OpenShard] = attrs.field(factory=dict, init=False, repr=False)
    _closed: bool = attrs.field(default=False, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # A reader that nobody closes gives its files back when it is collected.
        weakref.finalize(self, _close, self._shards)

    def bytes_view(self, info: TensorInfo) -> memoryview:
        """The tensor's `info.nbytes` stored bytes, writable, of format `B`.

        Mapped: a view of a private mapping, so that writing changes no file and no copy is made; the mapping
        lives as long as a view of it. Without mmap: a copy. Raises CheckpointError if the file changed,
        vanished or is too short, RequestError after `close` and for a tensor or snapshot whose weights are
        not here.
        """
        mapping = self._checked(info).mapping
        if mapping is None:
            return memoryview(self.read_copy(info))
        return memoryview(mapping)[info.begin : info.end]

    def read_copy(self, info: TensorInfo) -> bytearray:
        """The tensor's stored bytes in memory of their own, always by reading; errors as in `bytes_view`."""
        return self.read_part(info, 0, info.nbytes)

    def read_part(self, info: TensorInfo, start: int, stop: int) -> bytearray:
        """Bytes start..stop of the tensor in memory of their own; errors as in `bytes_view`.

        Raises RequestError unless 0 <= start <= stop <= info.nbytes.
        """
        if not 0 <= start <= stop <= info.nbytes:
            raise RequestError(
                "bytes outside the tensor",
                tensor=info.name,
                seen=f"{start}..{stop}",
                accepted=f"0..{info.nbytes}",
            )
        descriptor = self._checked(info).descriptor
        data = bytearray(stop - start)
        view, done = memoryview(data), 0
        while done < len(data):
            try:
                count = os.preadv(descriptor, [view[done : done + _READ_BYTES]], info.begin + start + done)
            except OSError as cause:
                raise _unreadable(info.file, cause, tensor=info.name) from cause
            if count == 0:
                raise CheckpointError(
                    "the file ends inside of the tensor: file changed while open",
                    file=info.file,
                    tensor=info.name,
                    seen=f"{done} of {len(data)} bytes",
                )
            done += count
        return data

    def check_mapped(self) -> None:
        """Raises CheckpointError if a mapped file was truncated or written to since its header was read.

        Asked of the open file, so that one that was deleted or replaced, which harms no mapping, passes. It
        turns the death of the process (SIGBUS) into an error unless the file shrinks after the check.
        """
        for file, shard in list(self._shards.items()):
            if shard.mapping is not None:
                self._compare(file, os.fstat(shard.descriptor))

    def close(self) -> None:
        """Close all files. Views that were given out stay valid: they keep their mapping."""
        with self._lock:
            self._closed = True
            _close(self._shards)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, info: TensorInfo) -> _OpenShard:
        with self._lock:
            if self._closed:
                raise RequestError("the checkpoint is closed", file=info.file, tensor=info.name)
            if self.snapshot.tensors.get(info.name) != info:
                raise RequestError("the tensor is not of this checkpoint", file=info.file, tensor=info.name)
            shard = self._shards.get(info.file)
            if shard is None:
                shard = self._shards[info.file] = self._open(info.file)
            try:
                # By path, not descriptor: this sees a file put in the other's place too.
                self._compare(info.file, os.stat(self.snapshot.shard_path(info.file)))
            except OSError as cause:
                raise _unreadable(info.file, cause, tensor=info.name) from cause
            return shard

    def _open(self, file: str) -> _OpenShard:
        path = self.snapshot.shard_path(file)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise _unreadable(file, cause) from cause
        try:
            status = os.fstat(descriptor)
            self._compare(file, status)
            mapping = _map(descriptor, status.st_size) if self.mmap else None
        except OSError as cause:
            os.close(descriptor)
            raise CheckpointError(
                f"the file cannot be mapped: {cause.strerror or cause}", file=file, fix="set VT_MMAP=0"
            ) from cause
        except CheckpointError:
            os.close(descriptor)
            raise
        return _OpenShard(descriptor=descriptor, mapping=mapping)

    def _compare(self, file: str, status: os.stat_result) -> None:
        before, now = self.snapshot.shards[file].identity, FileIdentity.of(status)
        if before != now:
            raise CheckpointError(
                "file changed while open: its header was read from another state of it",
                file=file,
                seen=f"{now}",
                accepted=f"{before}",
                fix="open the checkpoint again once nothing writes to it",
            )


def _close(shards: dict[str, _OpenShard]) -> None:
    for shard in shards.values():
        os.close(shard.descriptor)
    shards.clear()


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Private and writable: torch wants writable memory, and nothing written may reach the file. Without
    # MAP_NORESERVE (0x4000 in Linux's asm-generic/mman-common.h) no file larger than memory could be mapped.
    flags = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
    return mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _unreadable(file: str, cause: OSError, *, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(f"the file cannot be read: {cause.strerror or cause}", file=file, tensor=tensor)
