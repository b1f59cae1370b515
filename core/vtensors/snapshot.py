"""A checkpoint's files at one moment: validated headers, the tensors they hold, the small files beside
them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from vtensors.errors import CheckpointError, DeclarationError, RequestError
from vtensors.header import ShardHeader, read_header
from vtensors.provenance import Provenance, ShardProvenance
from vtensors.shard_files import INDEX_NAME, SUFFIX, ShardSelection, join_headers, listed, select_shards
from vtensors.strict_json import MAX_BYTES, parse_json
from vtensors.tensors import TensorInfo


@attrs.frozen(kw_only=True)
class Snapshot:
    """A checkpoint whose headers have been read and validated; no weight byte has.

    root: its directory, None where only headers were fetched from the Hub.
    provenance: with one entry per shard.
    shards: header by file name. tensors: record by tensor name.
    warnings: sentences for the user, such as files that were left out.
    side_files: content by name of the small files that came with the headers of a remote snapshot, None for a
        file that the repository does not have; None as a whole for a local one, which reads from `root`.
    """

    root: Path | None
    provenance: Provenance
    shards: Mapping[str, ShardHeader]
    tensors: Mapping[str, TensorInfo]
    warnings: tuple[str, ...] = ()
    side_files: Mapping[str, bytes | None] | None = None

    def read_bytes(self, name: str) -> bytes | None:
        """Content of a file beside the shards, None where it does not exist; at most `MAX_BYTES` long.

        Raises CheckpointError for a broken link or a file that is too long or unreadable, RequestError for a
        file that a header-only snapshot did not fetch.
        """
        if self.root is not None:
            return read_side_file(self.root, name)
        if self.side_files is None or name not in self.side_files:
            raise RequestError(
                f"{name} was not fetched: only headers and configurations of this repository were",
                file=self.provenance.source,
                fix="open it for loading, which downloads the files",
            )
        return self.side_files[name]

    def read_json(self, name: str) -> dict[str, object] | None:
        """The JSON object in a file beside the shards, None where the file does not exist.

        `Infinity` is accepted, as transformers writes it. Raises DeclarationError for anything but one JSON
        object, and what `read_bytes` raises.
        """
        data = self.read_bytes(name)
        if data is None:
            return None
        value = parse_json(data, file=name, what="content", error=DeclarationError, allow_infinity=True)
        if not isinstance(value, dict):
            raise DeclarationError(
                "the file does not hold a JSON object",
                file=name,
                seen=type(value).__name__,
                accepted="a JSON object",
                fix="download the file again",
            )
        return value

    def shard_path(self, file: str) -> Path:
        """Where the shard lies on disk. Raises RequestError where only its header was fetched."""
        if self.root is None:
            raise RequestError(
                "the weights are not on this machine, only their headers were fetched",
                file=file,
                seen="headers alone",
                accepted="a snapshot with its files",
                fix="open the repository for loading, which downloads the files",
            )
        return self.root / file


def open_snapshot(root: Path, provenance: Provenance, *, refuse_stray: bool = False) -> Snapshot:
    """The local checkpoint at `root`: a directory, or one `.safetensors` file whose directory supplies the
    configs.

    provenance: without shards; they are added.
    refuse_stray: raise for `.safetensors` files that are not part of the checkpoint instead of warning.

    Raises CheckpointError for everything that `select_local`, `read_header` and `join_headers` refuse.
    """
    selection = select_local(root)
    # Absolute: files are opened when they are asked for, and the process may have moved by then.
    folder = (root if root.is_dir() else root.parent).absolute()
    headers = {name: read_header(folder / name, name) for name in selection.files}
    return assemble(folder, provenance, selection, headers, refuse_stray=refuse_stray)


def assemble(
    root: Path | None,
    provenance: Provenance,
    selection: ShardSelection,
    headers: Mapping[str, ShardHeader],
    *,
    refuse_stray: bool = False,
    side_files: Mapping[str, bytes | None] | None = None,
) -> Snapshot:
    """The snapshot of headers that have been read; arguments as in `Snapshot` and `open_snapshot`."""
    warnings: tuple[str, ...] = ()
    if selection.strays:
        text = f"files beside the checkpoint are not part of it: {listed(selection.strays)}"
        if refuse_stray:
            raise CheckpointError(
                text,
                file=provenance.source,
                accepted=f"only {listed(selection.files)}",
                fix="remove them, or unset VT_STRICT=files",
            )
        warnings = (f"{text}; they are not read (VT_STRICT=files refuses them)",)
    tensors = join_headers(headers, selection.weight_map)
    shards = tuple(
        ShardProvenance(
            file=name, size=header.file_size, header_bytes=header.header_bytes, header_sha256=header.sha256
        )
        for name, header in headers.items()
    )
    return Snapshot(
        root=root,
        provenance=attrs.evolve(provenance, shards=shards),
        shards=MappingProxyType(dict(headers)),
        tensors=tensors,
        warnings=warnings,
        side_files=side_files,
    )


def select_local(root: Path) -> ShardSelection:
    """Which files of `root` are the checkpoint, each of them present and inside of it; see `select_shards`.

    Raises CheckpointError also for a broken link, and for a link that leaves the directory (the Hub cache's
    own links into its blobs folders are followed).
    """
    if root.is_file():
        if root.suffix != SUFFIX:
            raise CheckpointError(
                "not a checkpoint",
                file=str(root),
                seen="a file of another kind",
                accepted="a directory or a .safetensors file",
                fix="give the directory that holds the .safetensors files",
            )
        return ShardSelection(files=(root.name,), weight_map=None, strays=())
    _refuse_broken_link(root, str(root))
    try:
        names = os.listdir(root)
    except OSError as cause:
        raise CheckpointError(
            f"the directory cannot be read: {cause.strerror or cause}",
            file=str(root),
            fix="make it readable for this user (permissions, mount)",
        ) from cause
    selection = select_shards(str(root), names, read_side_file(root, INDEX_NAME))
    for name in selection.files:
        _refuse_link(root, name)
    return selection


def read_side_file(root: Path, name: str) -> bytes | None:
    """Content of the file `name` in the directory `root`, None where it does not exist; see
    `Snapshot.read_bytes`."""
    path = root / name
    _refuse_link(root, name)
    try:
        if not path.is_file():
            if not path.exists():
                return None
            raise CheckpointError(
                "not a regular file",
                file=name,
                seen="a directory, device or pipe",
                accepted="a file",
                fix="remove it, or put the file in its place",
            )
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as cause:
        raise CheckpointError(
            f"the file cannot be read: {cause.strerror or cause}",
            file=name,
            fix="make it readable for this user (permissions, mount), or download the file again",
        ) from cause
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            "the file is too long",
            file=name,
            seen="a longer file",
            accepted=f"at most {MAX_BYTES} bytes",
            fix="this is no configuration of a model: fetch the file again",
        )
    return data


def _refuse_link(root: Path, name: str) -> None:
    """Raises CheckpointError for a link that is broken or leaves the directory."""
    path = root / name
    if not path.is_symlink():
        return
    _refuse_broken_link(path, name)
    target = path.resolve()
    if not any(target.is_relative_to(folder) for folder in _link_targets(root)):
        raise CheckpointError(
            f"the file is a link that leaves the checkpoint's directory, to {target}",
            file=name,
            accepted="files inside of the directory, or links of the Hub cache into its blobs folder",
            fix="copy the file itself into the directory (cp -L), or open it by its own path",
        )


def _refuse_broken_link(path: Path, name: str) -> None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{name} is a broken link to {os.readlink(path)}; mount or copy the blobs folder too (cp -L)",
            file=str(path),
            accepted="a file, or a link to one",
            fix="mount or copy the blobs folder too (cp -L)",
        )


def _link_targets(root: Path) -> tuple[Path, ...]:
    folder = root.resolve()
    if folder.parent.name != "snapshots":
        return (folder,)
    repo_folder = folder.parent.parent
    # Newer caches link blobs/<etag> on to one store that all repositories of the cache share.
    return (folder, (repo_folder / "blobs").resolve(), (repo_folder.parent / "blobs").resolve())
