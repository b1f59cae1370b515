"""Everything that is wrong with one shard's header, and as much of it as can be used all the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

import attrs

from vtensors.errors import CheckpointError
from vtensors.header import (
    MAX_HEADER_BYTES,
    MAX_HEADER_DEPTH,
    FileIdentity,
    ShardHeader,
    header_length,
    read_header,
)
from vtensors.header_entries import check_layout, read_entries, read_metadata
from vtensors.strict_json import parse_json
from vtensors.tensors import TensorInfo
from vtensors.verification.findings import Finding, finding_of


def examine_header(path: Path, name: str) -> tuple[ShardHeader | None, list[Finding]]:
    """The shard's header and the findings about it; no data byte is read.

    The header is None where it cannot be read at all. Otherwise it holds every entry that describes a
    tensor, also of a file whose end is missing (such tensors end behind `file_size`). Findings carry the
    tensor's name, or `name` where the whole file is meant.
    """
    try:
        return read_header(path, name), []
    except CheckpointError as first:
        try:
            header, problems = _salvage(path, name)
        except (CheckpointError, OSError):
            return None, [finding_of("damaged-header", first, tensor=name)]
        return header, problems or [finding_of("damaged-header", first, tensor=name)]


def _salvage(path: Path, name: str) -> tuple[ShardHeader, list[Finding]]:
    with path.open("rb") as stream:
        identity = FileIdentity.of(os.fstat(stream.fileno()))
        prefix = stream.read(1024)
        total = header_length(name, prefix, identity.size)
        stream.seek(0)
        head = stream.read(total)
    content = parse_json(
        head[8:], file=name, what="header", max_depth=MAX_HEADER_DEPTH, max_bytes=MAX_HEADER_BYTES
    )
    if not isinstance(content, dict):
        raise CheckpointError(
            "the header is not a JSON object",
            file=name,
            seen=type(content).__name__,
            accepted="a JSON object of tensors",
        )
    findings: list[Finding] = []
    metadata: dict[str, str] = {}
    try:
        metadata = read_metadata(name, content.pop("__metadata__", None))
    except CheckpointError as problem:
        findings.append(finding_of("damaged-header", problem, tensor=name))
    tensors: list[TensorInfo] = []
    for tensor, entry in content.items():
        try:
            tensors.extend(read_entries(name, {tensor: entry}, total))
        except CheckpointError as problem:
            findings.append(finding_of("damaged-header", problem, tensor=tensor or name))
    findings.extend(_layout(name, tensors, total, identity.size, whole=not findings))
    header = ShardHeader(
        tensors=tuple(tensors),
        metadata=MappingProxyType(metadata),
        header_bytes=total,
        sha256=hashlib.sha256(head).hexdigest(),
        file_size=identity.size,
        identity=identity,
    )
    return header, findings


def _layout(name: str, tensors: list[TensorInfo], begin: int, size: int, *, whole: bool) -> Iterator[Finding]:
    """Overlaps, gaps, missing and trailing bytes. whole: no entry was left out, so that gaps mean something."""
    ordered = sorted(tensors, key=attrgetter("begin", "end"))
    for before, after in pairwise(ordered):
        if before.end > after.begin or (whole and before.end < after.begin):
            span = max(before.end, after.end)
            yield from _refusals("damaged-header", name, (before, after), before.begin, span)
    if not ordered:
        return
    first, end = ordered[0], max(info.end for info in ordered)
    if whole and first.begin != begin:
        yield from _refusals("damaged-header", name, (first,), begin, first.end)
    if end > size:
        last = attrs.evolve(first, begin=begin, end=end)
        yield from _refusals("truncated-file", name, (last,), begin, size, tensor=name)
    elif end < size and whole:
        last = attrs.evolve(first, begin=begin, end=end)
        yield from _refusals("trailing-bytes", name, (last,), begin, size, tensor=name)


def _refusals(
    code: str, name: str, tensors: tuple[TensorInfo, ...], begin: int, size: int, *, tensor: str = ""
) -> Iterator[Finding]:
    try:
        check_layout(name, tensors, begin, size)
    except CheckpointError as problem:
        yield finding_of(code, problem, tensor=tensor)
