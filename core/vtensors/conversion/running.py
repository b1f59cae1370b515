"""Carrying out a plan: tensor by tensor into files beside the destination, which is named last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.conversion.journal import JOURNAL_NAME, Journal, file_sha256
from vtensors.conversion.layout import PlannedShard
from vtensors.conversion.output import (
    check_destination,
    commit,
    locked,
    output_error,
    partial_directory,
    require_space,
    sync_directory,
)
from vtensors.conversion.planning import ConversionPlan
from vtensors.conversion.side_files import SideFile
from vtensors.conversion.writing import UnitWriter, write_at
from vtensors.errors import CheckpointError
from vtensors.reading import TensorReader


@attrs.frozen(kw_only=True)
class WrittenFile:
    """A file of the output. resumed: it was finished by an earlier run and is verified."""

    file: str
    size: int
    sha256: str
    resumed: bool = False


def run_plan(
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    destination: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[WrittenFile, ...]:
    """Write the output and return its files.

    progress: called with the bytes of each step; they add up to the bytes of the shards.
    Raises OutputError for a place that must not or cannot be written to, CheckpointError and WeightValueError
    for a source that changed or holds impossible values. Whatever stops it, DST is whole or absent.
    """
    check_destination(destination, checkpoint.snapshot.root, overwrite=overwrite)
    partial = partial_directory(destination, plan.fingerprint)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial):
            try:
                written = _write_all(checkpoint, plan, partial, progress)
                commit(partial, destination, overwrite=overwrite)
            except BaseException:
                _tidy(partial)
                raise
            return written
    except OSError as cause:
        raise output_error(cause, partial) from cause


def _write_all(
    checkpoint: Checkpoint, plan: ConversionPlan, partial: Path, progress: Callable[[int], None]
) -> tuple[WrittenFile, ...]:
    journal = Journal(path=partial / JOURNAL_NAME, fingerprint=plan.fingerprint)
    journal.load()
    done = {
        shard.file: journal.finished[shard.file]
        for shard in plan.shards
        if journal.holds(partial / shard.file, shard.size, progress)
    }
    require_space(partial, plan.total_bytes - sum(size for size, _ in done.values()))
    files = []
    with TensorReader(checkpoint.snapshot, mmap=False) as reader:
        writer = UnitWriter(checkpoint=checkpoint, reader=reader)
        for shard in plan.shards:
            if shard.file in done:
                size, digest = done[shard.file]
                files.append(WrittenFile(file=shard.file, size=size, sha256=digest, resumed=True))
                continue
            digest = _write_shard(plan, shard, partial / shard.file, writer, progress)
            journal.add(shard.file, shard.size, digest)
            files.append(WrittenFile(file=shard.file, size=shard.size, sha256=digest))
    for side in plan.files:
        _write_side(side, partial / side.name)
        files.append(WrittenFile(file=side.name, size=side.size, sha256=side.sha256))
    _remove_strangers(partial, {file.file for file in files} | {JOURNAL_NAME})
    sync_directory(partial)
    return tuple(files)


def _write_shard(
    plan: ConversionPlan,
    shard: PlannedShard,
    path: Path,
    writer: UnitWriter,
    progress: Callable[[int], None],
) -> str:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, shard.size)
        write_at(descriptor, shard.header, 0)
        for number in shard.units:
            writer.write(plan.units[number], descriptor, shard.offsets, progress)
        os.fsync(descriptor)
        return file_sha256(path)
    except BaseException:
        # Never leave a file under its final name that is not whole.
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _write_side(side: SideFile, path: Path) -> None:
    data = side.content
    if data is None and side.origin is not None:
        data = side.origin.read_bytes()
        if hashlib.sha256(data).hexdigest() != side.sha256:
            raise CheckpointError(
                "the file changed while the checkpoint was converted",
                file=side.name,
                seen="other contents than when the conversion began",
                accepted="a source that nothing writes to",
                fix="run the same command again when nothing writes to the source",
            )
    path.unlink(missing_ok=True)
    with path.open("xb") as stream:
        stream.write(data or b"")
        stream.flush()
        os.fsync(stream.fileno())


def _remove_strangers(partial: Path, known: set[str]) -> None:
    for path in partial.iterdir():
        if path.name not in known and not path.is_dir():
            path.unlink()


def _tidy(partial: Path) -> None:
    """Remove the partial directory when nothing in it is finished."""
    try:
        lines = (partial / JOURNAL_NAME).read_bytes().splitlines() if partial.is_dir() else []
        if partial.is_dir() and len(lines) <= 1:
            for path in partial.iterdir():
                path.unlink()
            partial.rmdir()
    except OSError:
        return
