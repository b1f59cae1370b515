"""Embeddings that are declared tied to the head, beside a head that is another matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vtensors.checkpoint import Checkpoint
from vtensors.matching import HEADS
from vtensors.reading import TensorReader
from vtensors.verification.findings import Finding, finding
from vtensors_plugins.row_windows import RowWindows, common_windows

# NVFP4, the coarsest scheme, differs from its source by a tenth (see docs/verify.md).
_ROUNDING = 0.2


def tied_findings(checkpoint: Checkpoint, reader: TensorReader) -> Iterator[Finding]:
    """`tied-but-different` where tie_word_embeddings is true and a stored head is not the embeddings.

    A head in another scheme may differ by its rounding.
    """
    tied = checkpoint.configs.text.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings"))
    head = next((checkpoint.modules[name] for name in HEADS if name in checkpoint.modules), None)
    embeddings = next(
        (module for name, module in checkpoint.modules.items() if name.endswith("embed_tokens")), None
    )
    if tied is not True or head is None or embeddings is None:
        return
    name = head.claim.roles["codes"].name
    if head.shape != embeddings.shape:
        yield finding("tied-but-different", name, seen=f"{list(head.shape)} against {list(embeddings.shape)}")
        return
    rows, error, total = _difference(
        RowWindows.of(checkpoint, head.name, reader), RowWindows.of(checkpoint, embeddings.name, reader)
    )
    relative = (error / total) ** 0.5 if total else float(error > 0)
    limit = 0.0 if head.scheme == embeddings.scheme else _ROUNDING
    if relative > limit:
        yield finding(
            "tied-but-different",
            name,
            seen=f"{rows:,} of {head.shape[0]:,} rows differ from {embeddings.name}, relative error "
            f"{relative:.3g}",
        )


def _difference(head: RowWindows, embeddings: RowWindows) -> tuple[int, float, float]:
    """(rows that differ, sum of squared differences, sum of squared embeddings)."""
    rows, error, total = 0, 0.0, 0.0
    for start, stop in common_windows(head, embeddings):
        left = head.read(start, stop).dequantize(torch.float32)
        right = embeddings.read(start, stop).dequantize(torch.float32)
        gap = left - right
        rows += int((gap != 0).any(1).sum())
        error += float(gap.double().square().sum())
        total += float(right.double().square().sum())
    return rows, error, total
