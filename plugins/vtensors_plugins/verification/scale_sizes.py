"""Scales that are what no calibration gives: inverted ones, and defaults that were never replaced."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from vtensors.checkpoint import Checkpoint
from vtensors.modules import Module, is_quantized
from vtensors.verification.findings import Finding, finding
from vtensors_plugins.verification.scanning import Scan
from vtensors_plugins.verification.small_values import SmallValues, is_usable

# A multiplier is amax / 2688 (NVFP4) or amax / 448 (FP8). Above 1 a weight would reach 448 at least; below
# 1e-9 it would stay below 3e-6. Both happen to the reciprocal of an ordinary scale, and to nothing else.
MOST_MULTIPLIER = 1.0
LEAST_MULTIPLIER = 1e-9
_INPUT_ROLES = ("input_scale", "input_divisor")


def size_findings(checkpoint: Checkpoint, scan: Scan, small: SmallValues) -> Iterator[Finding]:
    """`reciprocal-scale` and `never-calibrated` for the scales of weights and of inputs."""
    modules = [module for module in checkpoint.modules.values() if is_quantized(module.scheme)]
    for module in modules:
        yield from _weight_scale(module, small)
        yield from _fine_scales(module, scan)
    yield from _input_scales(
        [m for m in modules if m.name not in checkpoint.accounting.waived_modules], small
    )


def _weight_scale(module: Module, small: SmallValues) -> Iterator[Finding]:
    role = next((r for r in ("global_divisor", "global_scale", "scale") if r in module.claim.roles), None)
    multiplier = small.weight_multiplier(module)
    if role is None or multiplier is None or not is_usable(multiplier):
        return
    stored, name = small.scalar(module, role), module.claim.roles[role].name
    if role != "scale" and stored == 1.0:
        yield finding("never-calibrated", name, seen="1.0: the weight was empty or not seen by its writer")
    elif multiplier > MOST_MULTIPLIER or multiplier < LEAST_MULTIPLIER:
        sense = "divides" if role == "global_divisor" else "multiplies"
        yield finding("reciprocal-scale", name, seen=f"{stored!r}, which {sense}")


def _fine_scales(module: Module, scan: Scan) -> Iterator[Finding]:
    """Scales per row or block, all of which lie above 1."""
    info = module.claim.roles.get("scale")
    if info is None or module.scheme not in ("fp8-row", "fp8-block"):
        return
    if module.claim.part is not None and (module.claim.part.expert or module.claim.part.row_begin):
        return
    tally = scan.tallies.get(info.name)
    if tally is not None and MOST_MULTIPLIER < tally.low < float("inf"):
        yield finding("reciprocal-scale", info.name, seen=f"the smallest of them, {tally.low!r}, multiplies")


def _input_scales(modules: list[Module], small: SmallValues) -> Iterator[Finding]:
    kinds: dict[tuple[str, str], list[tuple[Module, float]]] = {}
    for module in modules:
        if module.declared == "16bit":
            continue
        role = next((role for role in _INPUT_ROLES if role in module.claim.roles), None)
        multiplier = small.input_multiplier(module)
        if role is None or multiplier is None or not is_usable(multiplier):
            continue
        name = module.claim.roles[role].name
        if small.scalar(module, role) == 1.0:
            yield finding("never-calibrated", name, seen="1.0 for the input of this module")
        else:
            kinds.setdefault((module.convention, module.scheme), []).append((module, multiplier))
    for alike in kinds.values():
        # Single layers have inputs in the thousands; that most of them have is the sign of an inversion.
        if median(multiplier for _, multiplier in alike) <= MOST_MULTIPLIER:
            continue
        for module, multiplier in alike:
            if multiplier > MOST_MULTIPLIER:
                role = next(role for role in _INPUT_ROLES if role in module.claim.roles)
                sense = "divides" if role == "input_divisor" else "multiplies"
                yield finding(
                    "reciprocal-scale",
                    module.claim.roles[role].name,
                    seen=f"{small.scalar(module, role)!r}, which {sense}, and most inputs are alike",
                )
