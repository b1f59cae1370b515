"""Parts that engines put into one matrix (q|k|v, gate|up, qkv|z), and whose scales differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vtensors.checkpoint import Checkpoint
from vtensors.matching import FUSED
from vtensors.modules import Module, is_quantized
from vtensors.verification.findings import Finding, finding
from vtensors_plugins.verification.small_values import SmallValues, is_usable

_FUSIONS = ("qkv_proj", "gate_up_proj", "in_proj_qkvz")
_OWNER = {part: fused for fused in _FUSIONS for part in FUSED[fused]}


def fused_findings(checkpoint: Checkpoint, small: SmallValues) -> Iterator[Finding]:
    """`fused-scales-differ` with the error that taking the largest would cause, `fused-input-scales-differ`.

    Experts are compared each for itself. Parts of different schemes are not fused by anybody.
    """
    for parts in fused_parts(checkpoint).values():
        yield from _differing(parts, small.weight_multiplier, "fused-scales-differ")
        if all(part.declared != "16bit" for part in parts.values()):
            yield from _differing(parts, small.input_multiplier, "fused-input-scales-differ")


def fused_parts(checkpoint: Checkpoint) -> dict[tuple[str, str, str], dict[str, Module]]:
    """(owner, fused name, scheme) -> part -> module, for quantized parts."""
    groups: dict[tuple[str, str, str], dict[str, Module]] = {}
    for name, module in checkpoint.modules.items():
        owner, _, last = name.rpartition(".")
        if last in _OWNER and is_quantized(module.scheme):
            groups.setdefault((owner, _OWNER[last], module.scheme), {})[last] = module
    return groups


def merging_error(scales: Mapping[str, float]) -> tuple[str, float]:
    """The part that suffers most when the largest multiplier is taken for all, and |largest / own - 1|."""
    largest = max(scales.values())
    part = min(scales, key=lambda name: scales[name])
    return part, largest / scales[part] - 1


def _differing(
    parts: Mapping[str, Module], multiplier: Callable[[Module], float | None], code: str
) -> Iterator[Finding]:
    scales: dict[str, float] = {}
    for name, module in parts.items():
        value = multiplier(module)
        if value is not None and is_usable(value):
            scales[name] = value
    if len(set(scales.values())) < 2:
        return
    worst, error = merging_error(scales)
    shown = ", ".join(f"{name} {value:.7g}" for name, value in scales.items())
    what = "the weights of" if code == "fused-scales-differ" else "the input of"
    yield finding(
        code,
        parts[worst].name,
        seen=f"{shown}; taking the largest for all would scale {what} {worst} by {1 + error:.4g} "
        f"(relative error {error:.3g})",
    )
