"""GPU architectures by name: which target a device is compiled for, and what a target may run on."""

from __future__ import annotations

import re

from vtensors.errors import RequestError

# Compute capability -> the most specific target. An `a` target has instructions that no other device runs.
TARGETS: dict[tuple[int, int], str] = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (11, 0): "sm_110a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
# What every kernel must compile for; those that were never run are documented as *compiled, not run*.
COMPILED = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
RUN = ("sm_90a",)
# Devices newer than this table run PTX made for the oldest one.
PORTABLE = "compute_80"
_TARGET = re.compile(r"(?:sm|compute)_(\d+)(\d)([af]?)$")


def target_of(capability: tuple[int, int]) -> str:
    """The compile target of a device: exact where known, portable PTX for a newer one.

    Raises RequestError below sm_80, which has no bfloat16 matrix instructions.
    """
    if capability < (8, 0):
        raise RequestError(
            "the GPU is too old",
            seen=f"compute capability {capability[0]}.{capability[1]}",
            accepted="8.0 or newer",
        )
    return TARGETS.get(capability, PORTABLE)


def macro_of(target: str) -> int:
    """The target's number as sources test it: 900 for `sm_90a`, 1210 for `sm_121a`."""
    found = _TARGET.match(target)
    if not found:
        raise RequestError("not a GPU target", seen=repr(target), accepted=", ".join((*COMPILED, PORTABLE)))
    return int(found[1]) * 100 + int(found[2]) * 10
