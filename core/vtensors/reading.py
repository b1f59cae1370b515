"""The stored bytes of tensors: mapped without a copy, or read into memory of their own."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence

import attrs

from vtensors.counts import counted
from vtensors.errors import CheckpointError, RequestError
from vtensors.header import FileIdentity
from vtensors.snapshot import Snapshot
from vtensors.tensors import TensorInfo

# One read call moves less than 2 GiB on Linux and macOS.
_READ_BYTES = 1 << 30
# Buffers of one call: IOV_MAX of Linux and macOS. Pages are given back where so many bytes lay behind one another.
_READ_BUFFERS, _RELEASED_BYTES = 1024, 1 << 20


@attrs.frozen(kw_only=True)
class Wanted:
    """Bytes start, start + 1, ... of a tensor, as many as `into` holds. into: writable, of single bytes."""

    info: TensorInfo
    into: memoryview
    start: int = 0

    @property
    def place(self) -> int:
        """Where they begin in the file."""
        return self.info.begin + self.start


@attrs.frozen(kw_only=True)
class _OpenShard:
    path: str
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
        data = bytearray(stop - start)
        self._read_run([Wanted(info=info, into=memoryview(data), start=start)])
        return data

    def read_into(self, wanted: Sequence[Wanted], *, release: bool = False) -> None:
        """Fills every `into`; what lies behind one another in a file is read together.

        release: lets the system take back the pages of the file, where it is much. Errors: as in `bytes_view`.
        """
        run: list[Wanted] = []
        size = 0
        for one in sorted(wanted, key=lambda one: (one.info.file, one.place)):
            if run and (
                one.info.file != run[0].info.file
                or one.place != run[0].place + size
                or size + len(one.into) > _READ_BYTES
                or len(run) == _READ_BUFFERS
            ):
                self._read_run(run, release=release)
                run, size = [], 0
            run.append(one)
            size += len(one.into)
        if run:
            self._read_run(run, release=release)

    def _read_run(self, run: Sequence[Wanted], *, release: bool = False) -> None:
        """Reads neighbours of one file, in order."""
        first = run[0].info
        descriptor, begin = self._checked(first).descriptor, run[0].place
        left = [one.into for one in run]
        size, done = sum(len(view) for view in left), 0
        while done < size:
            views = left if size - done <= _READ_BYTES else [left[0][:_READ_BYTES]]
            try:
                count = os.preadv(descriptor, views, begin + done)
            except OSError as cause:
                raise _unreadable(first.file, cause, tensor=first.name) from cause
            if count == 0:
                raise _cut_short(run, done)
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        if release and size >= _RELEASED_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)

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
                raise RequestError(
                    "the checkpoint is closed",
                    file=info.file,
                    tensor=info.name,
                    seen="a read after close()",
                    accepted="reads before it",
                    fix="open the checkpoint again",
                )
            if self.snapshot.tensors.get(info.name) != info:
                raise RequestError(
                    "the tensor is not of this checkpoint",
                    file=info.file,
                    tensor=info.name,
                    seen="a record of another checkpoint",
                    accepted="the records of this checkpoint's tensors",
                    fix="take it from checkpoint.snapshot.tensors",
                )
            shard = self._shards.get(info.file)
            if shard is None:
                shard = self._shards[info.file] = self._open(info.file)
            try:
                # By path, not descriptor: this sees a file put in the other's place too.
                self._compare(info.file, os.stat(shard.path))
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
        return _OpenShard(path=str(path), descriptor=descriptor, mapping=mapping)

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


def _cut_short(run: Sequence[Wanted], done: int) -> CheckpointError:
    """The error of a file that ends after `done` bytes of the run."""
    at, last = 0, run[0]
    for one in run:
        last = one
        if at + len(one.into) > done:
            break
        at += len(one.into)
    return CheckpointError(
        "the file ends inside of the tensor: file changed while open",
        file=last.info.file,
        tensor=last.info.name,
        seen=f"{done - at:,} of {counted(len(last.into), 'byte')}",
        accepted="a file that stays as it was when it was opened",
        fix="open the checkpoint again when nothing writes to it",
    )


def _unreadable(file: str, cause: OSError, *, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"the file cannot be read: {cause.strerror or cause}",
        file=file,
        tensor=tensor,
        fix="make it readable for this user (permissions, mount), or download the file again",
    )
