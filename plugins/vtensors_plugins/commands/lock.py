"""`vtensors lock`: write down what a checkpoint is, so that a later change is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vtensors.checkpoint import open_checkpoint
from vtensors.counts import counted
from vtensors.lock import LOCK_NAME, differences, make_lock, read_lock, write_lock


@click.command("lock")
@click.argument("source")
@click.option("--revision", help="Branch, tag or commit of a repository.")
@click.option(
    "-o", "--output", metavar="FILE", default=LOCK_NAME, show_default=True, help="Where to write the lock."
)
@click.option("--json", "as_json", is_flag=True, help="Print the lock and where it was written as JSON.")
def command(source: str, revision: str | None, output: str, as_json: bool) -> None:
    """Write a lock of SOURCE: a directory, a .safetensors file, or a repository `org/name[@revision]`.

    Revision and commit, a hash and the size of every shard, hashes of the files beside them, and the scheme of
    every module; no weight is read. A lock that is there already is replaced, saying what moved.
    """
    path = Path(output)
    before = read_lock(path) if path.exists() else None
    lock = make_lock(open_checkpoint(source, revision, download=False))
    write_lock(lock, path)
    moved = list(differences(before, lock)) if before is not None else []
    if as_json:
        click.echo(json.dumps({"file": str(path), "moved": moved, "lock": lock.to_json()}, indent=1))
        return
    commit = f" @ {lock.commit}" if lock.commit else " (no commit is known: pinned by its hashes alone)"
    click.echo(f"{lock.source}{commit}")
    files = sum(digest is not None for digest in lock.files.values())
    click.echo(
        f"{path}: {counted(len(lock.shards), 'shard')}, {counted(files, 'file')}, {counted(lock.modules, 'module')} "
        f"of {counted(len(lock.groups), 'kind')}, {counted(path.stat().st_size, 'byte')}"
    )
    if before is not None:
        click.echo("\n".join(moved) if moved else "Nothing has moved since the lock that was there.")
