"""The files beside the weights: the target's configuration, the index, and copies of everything else."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.errors import CheckpointError
from vtensors.shard_files import INDEX_NAME, SUFFIX

_CHUNK = 8 << 20
# Weights in other containers: they are not what is converted, and would contradict the output.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".onnx", ".h5", ".msgpack")
# Says how the source was quantized, in llm-compressor's words.
_RECIPE = "recipe.yaml"


@attrs.frozen(kw_only=True)
class SideFile:
    """A file of the output. content: made here; None = copied from `origin`, byte for byte."""

    name: str
    size: int
    sha256: str
    content: bytes | None = None
    origin: Path | None = None


def side_files(
    checkpoint: Checkpoint,
    configured: Mapping[str, Mapping[str, Any] | None],
    index: tuple[str, bytes] | None,
) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """(files, sentences for what is left out).

    configured: files that the target decides, None = must not be there. A remote checkpoint of which only
    headers are known has no other files than these.
    """
    made = {
        name: json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
        for name, value in configured.items()
        if value is not None
    }
    if index is not None:
        made[index[0]] = index[1]
    files = [
        SideFile(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest(), content=data)
        for name, data in made.items()
    ]
    left_out = []
    root = checkpoint.snapshot.root
    if root is None:
        return tuple(files), ()
    for path in sorted(root.iterdir()):
        name = path.name
        if name in configured or name == INDEX_NAME or name.endswith(SUFFIX) or name.startswith("."):
            continue
        if name == _RECIPE and _changed(checkpoint, configured):
            left_out.append(f"{name}: says how the source was quantized")
        elif name.endswith(_OTHER_WEIGHTS):
            left_out.append(f"{name}: weights in another container")
        elif path.is_dir():
            left_out.append(f"{name}/: a directory")
        else:
            files.append(_copied(root, path))
    return tuple(files), tuple(left_out)


def _changed(checkpoint: Checkpoint, configured: Mapping[str, Mapping[str, Any] | None]) -> bool:
    return configured.get("config.json") != checkpoint.configs.config


def _copied(root: Path, path: Path) -> SideFile:
    """The record of a regular file inside of the checkpoint. Raises CheckpointError for anything else."""
    target = path.resolve()
    folder = root.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed += [folder.parent.parent / "blobs", folder.parent.parent.parent / "blobs"]
    if not target.is_file() or not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            "the file is a broken link, a link that leaves the checkpoint, or no regular file",
            file=path.name,
            seen=str(target),
            accepted="files of the checkpoint's directory",
            fix="remove it, or put the file itself in its place",
        )
    digest, size = hashlib.sha256(), 0
    try:
        with target.open("rb") as stream:
            while data := stream.read(_CHUNK):
                digest.update(data)
                size += len(data)
    except OSError as cause:
        raise CheckpointError(
            f"the file cannot be read: {cause.strerror or cause}",
            file=os.fspath(path.name),
            fix="make it readable for this user (permissions, mount), or download the file again",
        ) from cause
    return SideFile(name=path.name, size=size, sha256=digest.hexdigest(), origin=target)
