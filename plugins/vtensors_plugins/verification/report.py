"""`verify` as a function: the findings of a checkpoint, and what was looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs

from vtensors.errors import RequestError
from vtensors.verification.findings import Finding
from vtensors.verification.hashes import hash_findings, hashed_files
from vtensors.verification.opening import Opened
from vtensors.verification.structure import structure_findings

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
# Hashing is one core per file; more threads than that only contend for the disk.
_THREADS = 4


@attrs.frozen(kw_only=True)
class Report:
    """findings: errors first. checked_tensors, checked_bytes: whose values were looked at, all of them read.

    values: whether values were looked at, or headers only. comparisons: one per weight, with `--against`.
    """

    findings: tuple[Finding, ...]
    checked_tensors: int
    checked_bytes: int
    values: bool
    comparisons: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as `verify --json` prints it."""
        more = {"comparisons": list(self.comparisons)} if self.comparisons else {}
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "checked_tensors": self.checked_tensors,
            "checked_bytes": self.checked_bytes,
            "values": self.values,
            **more,
        }


def verify(
    opened: Opened,
    bar: ProgressBar,
    *,
    values: bool = True,
    hashes: bool = False,
    against: Opened | None = None,
) -> Report:
    """Everything that is wrong with the checkpoint, as far as it was opened.

    bar: (task, total bytes) -> context manager of a function that is told of bytes done.
    values: read every tensor; needs torch. Without it only headers and configuration are looked at.
    hashes: compare contents with the Hub's hashes. against: the reference, its values are read.
    Errors: RequestError where the weights are needed and not on this machine, or no file's hash is known.
    """
    findings = structure_findings(opened)
    checkpoint = opened.checkpoint
    tensors = len(checkpoint.snapshot.tensors) if checkpoint is not None else 0
    read = 0
    comparisons: tuple[dict[str, Any], ...] = ()
    if hashes:
        findings.extend(_hashes(opened, bar))
    if values and opened.root is None:
        raise RequestError(
            "the weights are not on this machine, only their headers were fetched",
            seen="a repository without a full snapshot in the cache",
            accepted="a snapshot in the cache, or a local path",
            fix="download the repository, or check its headers alone with --structure-only",
        )
    if values and checkpoint is not None:
        from vtensors_plugins.verification.everything import check_values

        more, tensors, read = check_values(checkpoint, bar)
        findings.extend(more)
    if against is not None:
        from vtensors_plugins.verification.against import compare

        more, comparisons = compare(opened, against, bar)
        findings.extend(more)
    return Report(
        findings=tuple(sorted(findings, key=lambda f: f.severity != "error")),
        checked_tensors=tensors,
        checked_bytes=read,
        values=values,
        comparisons=comparisons,
    )


def _hashes(opened: Opened, bar: ProgressBar) -> list[Finding]:
    files = hashed_files(opened.root or Path())
    if opened.root is None or not any(file.expected for file in files):
        raise RequestError(
            "no file here has a hash to compare with",
            file=str(opened.root or ""),
            seen="no blobs and no metadata of a download",
            accepted="a snapshot of a Hub cache, or a folder that `hf download --local-dir` filled",
            fix="leave --hash out",
        )
    total = sum(file.path.stat().st_size for file in files if file.expected)
    with bar("hash", total) as progress:
        return list(hash_findings(files, _THREADS, progress))
