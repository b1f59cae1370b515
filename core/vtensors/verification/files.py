"""The files of a checkpoint that can be read, and a finding for each that cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from vtensors.counts import counted
from vtensors.errors import CheckpointError
from vtensors.header import ShardHeader
from vtensors.shard_files import INDEX_NAME, SUFFIX, listed, parse_index
from vtensors.snapshot import read_side_file, select_local
from vtensors.tensors import TensorInfo
from vtensors.verification.damaged_headers import examine_header
from vtensors.verification.findings import Finding, finding, finding_of


@attrs.define
class Files:
    """folder: of the checkpoint. names: shards that are there. headers: of those that could be read.

    weight_map: of the index, None without one. strays: weight files that are not part of the checkpoint.
    """

    folder: Path
    names: list[str] = attrs.field(factory=list)
    headers: dict[str, ShardHeader] = attrs.field(factory=dict)
    weight_map: Mapping[str, str] | None = None
    strays: tuple[str, ...] = ()
    findings: list[Finding] = attrs.field(factory=list)

    @property
    def lost(self) -> dict[str, str]:
        """tensor -> the file that should hold it and could not be read."""
        return {t: file for t, file in (self.weight_map or {}).items() if file not in self.headers}


def read_files(root: Path) -> Files:
    """The files of the checkpoint at `root` with their headers, as far as they can be read.

    Raises CheckpointError for what is no checkpoint at all.
    """
    files = _find_files(root)
    for name in files.names:
        header, problems = examine_header(files.folder / name, name)
        files.findings.extend(problems)
        if header is not None:
            files.headers[name] = header
    files.headers = _without_duplicates(files.headers, files.findings)
    files.findings.extend(_against_index(files.headers, files.weight_map))
    files.findings.extend(
        finding("stray-file", name, seen=f"read are only {listed(files.names)}") for name in files.strays
    )
    return files


def _find_files(root: Path) -> Files:
    files = Files(folder=root if root.is_dir() else root.parent)
    try:
        selection = select_local(root)
    except CheckpointError as problem:
        if not root.is_dir():
            raise
        _salvage_files(files, problem)
        return files
    files.names, files.weight_map, files.strays = (
        list(selection.files),
        selection.weight_map,
        selection.strays,
    )
    return files


def _salvage_files(files: Files, problem: CheckpointError) -> None:
    """Fill in what can be read of a directory that `select_local` refuses. Raises where nothing can."""
    try:
        present = sorted(name for name in os.listdir(files.folder) if not name.startswith("."))
    except OSError as cause:
        raise problem from cause
    shards = [name for name in present if name.endswith(SUFFIX)]
    has_index = INDEX_NAME in present
    if not shards and not has_index:
        raise problem
    wanted = shards
    if has_index:
        try:
            files.weight_map = parse_index(read_side_file(files.folder, INDEX_NAME) or b"")
            wanted = sorted(set(files.weight_map.values()))
            files.strays = tuple(name for name in shards if name not in wanted)
        except CheckpointError as broken:
            files.findings.append(finding_of("damaged-index", broken, tensor=INDEX_NAME))
    elif len(shards) > 1:
        files.findings.append(finding_of("ambiguous-files", problem))
    for name in wanted:
        refused = _why_not(files, name)
        if refused is None:
            files.names.append(name)
        else:
            files.findings.append(refused)


def _why_not(files: Files, name: str) -> Finding | None:
    """Why the shard cannot be read, asked of the file by its own path; None where it can."""
    path = files.folder / name
    count = sum(1 for file in (files.weight_map or {}).values() if file == name)
    if not path.exists() and not path.is_symlink():
        return finding(
            "missing-file",
            name,
            seen=f"no such file; the index puts {counted(count, 'tensor')} into it",
            fix="incomplete download: download the missing file",
        )
    wrong = _wrong_link(files.folder, name)
    return finding("broken-link", name, seen=wrong) if wrong else None


def _wrong_link(folder: Path, name: str) -> str | None:
    """What is wrong with the link of that name; None for a good one and for a file."""
    path = folder / name
    if path.is_symlink() and not path.exists():
        return f"a broken link to {os.readlink(path)}"
    target, home = path.resolve(), folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed += [home.parent.parent / "blobs", home.parent.parent.parent / "blobs"]
    if not any(target.is_relative_to(place.resolve()) for place in allowed):
        return f"a link that leaves the checkpoint, to {target}"
    return None


def _without_duplicates(headers: dict[str, ShardHeader], findings: list[Finding]) -> dict[str, ShardHeader]:
    seen: dict[str, TensorInfo] = {}
    kept = {}
    for file, header in headers.items():
        own = []
        for info in header.tensors:
            first = seen.setdefault(info.name, info)
            if first is info:
                own.append(info)
            else:
                findings.append(
                    finding("duplicate-tensor", info.name, seen=f"in {first.file} and in {info.file}")
                )
        kept[file] = attrs.evolve(header, tensors=tuple(own))
    return kept


def _against_index(
    headers: Mapping[str, ShardHeader], weight_map: Mapping[str, str] | None
) -> Iterator[Finding]:
    if weight_map is None:
        return
    found = {info.name: info.file for header in headers.values() for info in header.tensors}
    for name, file in weight_map.items():
        if file in headers and name not in found:
            yield finding("index-differs", name, seen=f"the index puts it into {file}, whose header lacks it")
        elif name in found and found[name] != file:
            yield finding("index-differs", name, seen=f"it lies in {found[name]}, the index says {file}")
    for name, file in found.items():
        if name not in weight_map:
            yield finding("index-differs", name, seen=f"it lies in {file}, the index does not name it")
