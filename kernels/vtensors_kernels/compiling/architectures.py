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
# The first with bfloat16 matrix instructions.
OLDEST = (8, 0)
# What every kernel must compile for; those that were never run are documented as *compiled, not run*.
COMPILED = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")
RUN = ("sm_90a",)
# Most shared memory of one block in KiB, static and dynamic (CUDA C++ programming guide, technical specifications).
SHARED_KIB: dict[str, int] = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_103a": 227,
    "sm_110a": 227,
    "sm_120a": 99,
    "sm_121a": 99,
}
# Devices newer than this table run PTX made for the oldest one.
PORTABLE = "compute_80"
_TARGET = re.compile(r"(?:sm|compute)_([0-9]+)([0-9])([af]?)$")


def target_of(capability: tuple[int, int]) -> str:
    """The compile target of a device: exact where known, portable PTX for a newer one.

    Raises RequestError below sm_80, which has no bfloat16 matrix instructions.
    """
    if capability < OLDEST:
        raise RequestError(
            "the GPU is too old",
            seen=f"compute capability {capability[0]}.{capability[1]}",
            accepted="8.0 or newer",
        )
    return TARGETS.get(capability, PORTABLE)


def state_of(target: str) -> str:
    """`run`, or `compiled, not run` for a target on which nothing was ever launched."""
    return "run" if target in RUN else "compiled, not run"


def capability_of(target: str) -> tuple[int, int]:
    """(12, 1) of `sm_121a`, `sm_121` or `sm_121f`. Raises RequestError for what is not spelled like a target."""
    found = _TARGET.match(target)
    if not found or not target.startswith("sm_"):
        raise RequestError("not a GPU target", seen=repr(target), accepted=", ".join(COMPILED))
    return int(found[1]), int(found[2])


def macro_of(target: str) -> int:
    """The target's number as sources test it: 900 for `sm_90a`, 1210 for `sm_121a`."""
    found = _TARGET.match(target)
    if not found:
        raise RequestError("not a GPU target", seen=repr(target), accepted=", ".join((*COMPILED, PORTABLE)))
    return int(found[1]) * 100 + int(found[2]) * 10
