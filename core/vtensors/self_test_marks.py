"""Marks of self-tests that began: one that a dead process left behind condemns the kernel for the next ones.

A mark is a file with one fact, in the form of `kernel_entries`, held by an exclusive lock while the test runs. The
system releases the lock when the process dies, however it dies and whatever container it ran in. So a mark that can
be locked and still says `pending` is of a test that never ended; one that cannot is of a test that goes on somewhere
else. The file stays, empty, when a test ends: removed, two processes could each lock a file of that name. Where files
cannot be locked, there are no marks; where they cannot be written, those that are there are believed.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import IO

import attrs

from vtensors.kernel_entries import entry_text, fact_of

PENDING, CONDEMNED = "pending", "condemned"
# A test that a living process is said to run for longer counts as one that never ends.
OLDEST_SECONDS = 3600.0


@attrs.frozen(kw_only=True)
class Condemned:
    """A test that never ended or took the device with it.

    why: in words. own: whether this very process ran it, and so has a device that does not answer.
    """

    why: str
    own: bool


@attrs.define(kw_only=True)
class SelfTestMark:
    """The mark of one kernel's tests. path: of the file. key: what it is about (`kernel_entries.mark_key`).

    The thread of a test that is given up may still write: what `condemn` wrote stays.
    """

    path: Path
    key: str
    now: Callable[[], float] = time.time
    _held: IO[str] | None = attrs.field(default=None, init=False)
    _one_at_a_time: Lock = attrs.field(init=False, factory=Lock, eq=False, repr=False)

    def take(self) -> Condemned | None:
        """Locks the mark for a test that is about to begin; tells what an earlier one left there, which stays.

        Where another process (or thread) holds it, nothing is locked, and its test says nothing yet about the kernel,
        unless it has gone on for an hour.
        """
        found = _open(self.path)
        if found is None:
            return None
        file, locked = found
        condemned = self._left(_content(file), locked=locked)
        if locked and condemned is None and file.writable():
            self._held = file
        else:
            _close(file)
        return condemned

    def pending(self) -> None:
        """From here on the end of this process condemns the kernel."""
        self._write({"state": PENDING, "process": _this_process(), "since": self.now()})

    def lift(self) -> None:
        """From here on it does not."""
        self._write(None)

    def condemn(self, why: str) -> bool:
        """The kernel is not tried again; whether that could be kept."""
        fact = {"state": CONDEMNED, "process": _this_process(), "since": self.now(), "why": why}
        return self._write(fact, last=True)

    def release(self) -> None:
        """The test ended, well or not."""
        self._write(None, last=True)

    def _left(self, text: str, *, locked: bool) -> Condemned | None:
        fact = fact_of(text, self.key)
        since = None if fact is None else fact.get("since")
        if fact is None or not isinstance(since, float):
            return None
        own = fact.get("process") == _this_process()
        if fact.get("state") == CONDEMNED:
            return Condemned(why=f"{fact.get('why')} ({_day(since)})", own=own)
        if fact.get("state") == PENDING and (locked or self.now() - since > OLDEST_SECONDS):
            owner = "its process is gone" if locked else "another process still runs it"
            return Condemned(why=f"never ended ({_day(since)}; {owner})", own=own)
        return None

    def _write(self, fact: dict[str, object] | None, *, last: bool = False) -> bool:
        """Whether the mark says so now. last: it is given back then."""
        with self._one_at_a_time:
            if self._held is None:
                return False
            written = True
            try:
                self._held.seek(0)
                self._held.truncate()
                if fact is not None:
                    self._held.write(entry_text(self.key, fact))
                self._held.flush()
            except OSError:
                written = False
            if last or not written:
                _close(self._held)
                self._held = None
            return written


def _open(path: Path) -> tuple[IO[str], bool] | None:
    """The file, to write where that is allowed, and whether its lock is ours now; None where there can be no marks."""
    try:
        import fcntl
    except ImportError:
        return None
    file = _file_of(path)
    if file is None:
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if file.writable() else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return file, False
    except OSError:
        file.close()
        return None
    return file, True


def _file_of(path: Path) -> IO[str] | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+", encoding="utf-8")
    except OSError:
        with suppress(OSError):
            return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), encoding="utf-8")
    return None


def _close(file: IO[str]) -> None:
    """Given back for all: a child that was forked in between holds the same lock until it ends."""
    with suppress(OSError, ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
    with suppress(OSError):
        file.close()


def _content(file: IO[str]) -> str:
    try:
        return file.read()
    except (OSError, ValueError):
        return ""


def _day(since: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(since))


def _this_process() -> str:
    """A word that no other process has, whatever container it runs in."""
    return _word_of(os.getpid())


@lru_cache(maxsize=1)
def _word_of(pid: int) -> str:
    return f"{pid}-{uuid.uuid4().hex}"
