"""Where the output goes: beside its place first, then renamed; never into a Hub cache or over the source."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vtensors.conversion.journal import JOURNAL_NAME
from vtensors.errors import OutputError
from vtensors.provenance import REPO_FOLDER_PREFIX

_KEEP = "what is finished is kept beside it; the same command goes on from there"


def check_destination(destination: Path, source: Path | None, *, overwrite: bool) -> None:
    """Raises OutputError for a place that must not be written to, before any work.

    source: the source's directory. overwrite: whether a directory that is not empty may be replaced.
    """
    place = _resolved(destination)
    inside = hub_cache_of(place)
    if inside is not None:
        raise OutputError(
            "the destination lies inside of a Hub cache",
            file=str(destination),
            seen=f"{place} (in {inside})",
            accepted="a directory outside of it: a cached file must stay what its name says",
            fix="choose another DESTINATION",
        )
    if source is not None:
        own = source.resolve()
        if place == own or place.is_relative_to(own) or own.is_relative_to(place):
            raise OutputError(
                "the destination and the source are the same directory, or one lies in the other",
                file=str(destination),
                seen=f"source {own}",
                fix="choose another DESTINATION",
            )
    if place.exists() and not place.is_dir():
        raise OutputError(
            "the destination is a file",
            file=str(destination),
            seen="a file",
            accepted="a directory that does not exist or is empty",
            fix="choose another DESTINATION",
        )
    if place.is_dir() and any(place.iterdir()) and not overwrite:
        raise OutputError(
            "the destination exists and is not empty",
            file=str(destination),
            seen="a directory with files in it",
            accepted="a directory that does not exist or is empty",
            fix="choose another DESTINATION, or give --overwrite",
        )


def hub_cache_of(place: Path) -> Path | None:
    """The Hub cache folder that a resolved path lies in (the variables or the default, or folder names)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    named = [os.environ.get("HF_HUB_CACHE"), os.environ.get("HUGGINGFACE_HUB_CACHE")]
    named.append(os.path.join(home, "hub"))
    for text in named:
        folder = Path(os.path.realpath(os.path.expanduser(text))) if text else None
        if folder is not None and place.is_relative_to(folder):
            return folder
    for folder in (place, *place.parents):
        if folder.name.startswith(REPO_FOLDER_PREFIX) and (
            folder != place or (folder / "snapshots").is_dir() or (folder / "blobs").is_dir()
        ):
            return folder
    return None


def partial_directory(destination: Path, fingerprint: str) -> Path:
    """`DST.partial-<plan>` beside the destination: the same plan finds its own earlier work."""
    place = _resolved(destination)
    return place.with_name(f"{place.name}.partial-{fingerprint[:12]}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process. Raises OutputError when another one writes to it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise OutputError(
                "another process is writing the same conversion",
                file=str(folder),
                seen="its lock is held",
                accepted="one process at a time",
                fix="wait for it",
            ) from cause
        yield
    finally:
        os.close(descriptor)


def require_space(folder: Path, needed: int) -> None:
    """Raises OutputError when the file system has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            "not enough space on the disk",
            file=str(folder),
            seen=f"{free:,} bytes free",
            accepted=f"{needed:,} bytes",
            fix="free some space, or choose a DESTINATION on another disk",
        )


def commit(partial: Path, destination: Path, *, overwrite: bool) -> None:
    """Give the finished directory its name; what was there before is removed after that.

    The journal goes first, so that the output holds what belongs to a checkpoint and nothing else.
    """
    place = _resolved(destination)
    (partial / JOURNAL_NAME).unlink(missing_ok=True)
    sync_directory(partial)
    old = None
    if place.is_dir() and any(place.iterdir()):
        if not overwrite:
            check_destination(destination, None, overwrite=False)
        old = place.with_name(f"{place.name}.old-{os.getpid()}")
        os.rename(place, old)
    os.rename(partial, place)
    sync_directory(place.parent)
    if old is not None:
        shutil.rmtree(old)


def sync_directory(folder: Path) -> None:
    """Put the directory's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def output_error(cause: OSError, where: Path) -> OutputError:
    """A failed system call as an error that says what to do."""
    full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return OutputError(
        f"cannot write: {'no space left on the disk' if full else cause.strerror or cause}",
        file=str(cause.filename or where),
        fix=f"free some space; {_KEEP}" if full else f"make it writable; {_KEEP}",
    )


def _resolved(path: Path) -> Path:
    return Path(os.path.abspath(path)).resolve()
