"""KV-cache scales of the checkpoint by attention module, whatever they are called on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from vtensors.errors import ClaimError
from vtensors.records import TensorSource
from vtensors.tensors import TensorInfo


@attrs.frozen(kw_only=True)
class KvScales:
    """Multipliers of one layer's cached K and V: stored = value / scale. notes: what was filled in, and why."""

    k: float
    v: float
    notes: tuple[str, ...] = ()


def read_kv_scales(
    owners: Mapping[str, Mapping[str, TensorInfo]], source: TensorSource
) -> dict[str, KvScales]:
    """attention module -> KvScales.

    One of the two alone serves both, noted. Zero, negative or NaN (the -1 of loaders that never filled it)
    counts as absent: 1.0, noted. Errors: ClaimError for more than one value (per-head scales), infinity, or
    an affine cache (`k_bias`, `v_bias`), whose scales are for centered values.
    """
    found = {}
    for module, scales in owners.items():
        _refuse_affine(scales)
        notes: list[str] = []
        values = {what: _value(info, source, notes) for what, info in scales.items() if len(what) <= 2}
        both = values.get("kv")
        k, v = values.get("k", both), values.get("v", both)
        if (k is None) != (v is None):
            present = "k" if v is None else "v"
            notes.append(f"{module}: only {present}_scale is present, used for both")
        k = v if k is None else k
        v = k if v is None else v
        if k is None or v is None:
            continue
        found[module] = KvScales(k=k, v=v, notes=tuple(notes))
    return found


def _refuse_affine(scales: Mapping[str, TensorInfo]) -> None:
    for what, info in scales.items():
        if what.endswith("_bias"):
            raise ClaimError(
                "an affine KV cache is not supported",
                file=info.file,
                tensor=info.name,
                seen=info.describe(),
                accepted="scales alone",
                fix="keep the cache in 16 bits (kv_cache_dtype 'auto')",
            )


def _value(info: TensorInfo, source: TensorSource, notes: list[str]) -> float:
    if math.prod(info.shape) != 1:
        raise ClaimError(
            "a KV-cache scale with more than one value",
            file=info.file,
            tensor=info.name,
            seen=info.describe(),
            accepted="one value per layer, shape [] or [1]",
            fix="export the checkpoint again, with one scale per layer",
        )
    value = float(source.view(info).float().reshape(()))
    if math.isinf(value):
        raise ClaimError(
            "a KV-cache scale is infinite",
            file=info.file,
            tensor=info.name,
            seen=str(value),
            accepted="> 0",
            fix="calibrate and export the checkpoint again",
        )
    if math.isnan(value) or value <= 0:
        notes.append(f"{info.name} is {value}: taken as absent, 1.0")
        return 1.0
    return value
