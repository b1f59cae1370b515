"""Findings about the values of KV-cache scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from vtensors.checkpoint import Checkpoint
from vtensors.forms import FLOAT_DTYPES
from vtensors.grouping import group_tensors
from vtensors.verification.findings import Finding, finding
from vtensors_plugins.verification.small_values import SmallValues, is_usable


def kv_findings(checkpoint: Checkpoint, small: SmallValues) -> Iterator[Finding]:
    """Sentinels (zero, negative, NaN), infinities, scales per head, and scales that look inverted."""
    usable: dict[str, float] = {}
    owners = group_tensors(checkpoint.snapshot.tensors.values()).kv_scales
    for scales in owners.values():
        for what, info in scales.items():
            if what.endswith("zero_point") or info.dtype not in FLOAT_DTYPES:
                continue
            if math.prod(info.shape) != 1:
                yield finding("kv-scale-shape", info.name, seen=info.describe())
                continue
            for value in small.of(info):
                if math.isinf(value):
                    yield finding("kv-scale-infinite", info.name, seen=repr(value))
                elif not is_usable(value):
                    yield finding("kv-scale-sentinel", info.name, seen=repr(value))
                else:
                    usable[info.name] = value
    # amax / 448: above 1 only where keys or values beyond 448 are cached, never in most layers.
    if usable and median(usable.values()) > 1:
        for name, value in usable.items():
            if value > 1:
                yield finding(
                    "reciprocal-scale", name, seen=f"{value!r}, which multiplies, and most are alike"
                )
