"""Which devices a kernel's targets serve: exact architectures, families, any CUDA device, any device.

A target is `cpu` (or another device type), `portable`, `cuda`, `sm_90a` or `sm_90` (that compute capability and no
other), or `sm_120f` (the family: the same major version from that minor version on).
Source of the meaning of `a` and `f`: CUDA C++ Programming Guide, architecture- and family-specific features.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import lru_cache

from vtensors.records import KernelRequest

# The compute capabilities that this version was written for.
KNOWN_CAPABILITIES = (
    (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
)  # fmt: skip
# From this major version on there are family targets, before version 9 there are no `a` targets.
_FIRST_FAMILY, _FIRST_EXACT = 10, 9
_TARGET = re.compile(r"sm_([0-9]+)([0-9])([af]?)$")
_log = logging.getLogger("vtensors")

EXACT, FAMILY, CUDA, PORTABLE = range(4)


def specificity(targets: Iterable[str], request: KernelRequest) -> int | None:
    """How closely the closest of the targets fits the device: EXACT 0, FAMILY, CUDA, PORTABLE 3; None: not at all."""
    found = (_specificity(target, request) for target in targets)
    return min((value for value in found if value is not None), default=None)


def reason_against(targets: Iterable[str], request: KernelRequest) -> str:
    """Why targets that do not serve the device do not: what they are and which ones the device needs."""
    made = f"made for {', '.join(targets)}"
    if request.capability is None:
        return f"{made}, not {device_name(request)}"
    return f"{made}; {device_name(request)} needs {needed_targets(request.capability)}"


def needed_targets(capability: tuple[int, int]) -> str:
    """The targets made for a device, in words: `sm_89`, `sm_90a`, `sm_121a or sm_120f`."""
    major, minor = capability
    if major < _FIRST_EXACT:
        return f"sm_{major}{minor}"
    return f"sm_{major}{minor}a" + (f" or sm_{major}0f" if major >= _FIRST_FAMILY else "")


def device_name(request: KernelRequest) -> str:
    """The device of a request in a message: `cpu`, `sm_90`."""
    if request.capability is None:
        return device_type(request.device)
    major, minor = request.capability
    return f"sm_{major}{minor}"


def device_type(device: str) -> str:
    """`cuda` for `cuda:1`."""
    return device.partition(":")[0]


def problem_with_target(target: str) -> str | None:
    """What is wrong with a target's spelling, as the end of a sentence, or None."""
    if target.startswith(("sm", "compute")) and not _TARGET.match(target):
        return f"has the target {target!r}; accepted: cpu, portable, cuda, sm_90a, sm_120f, ..."
    return None if target else "has an empty target"


@lru_cache(maxsize=32)
def tell_unknown(capability: tuple[int, int] | None) -> None:
    """One line per process for a capability that this version does not know; nothing for the others."""
    if capability is not None and capability not in KNOWN_CAPABILITIES:
        major, minor = capability
        _log.warning(
            "compute capability %d.%d is not known to this version: only kernels for any CUDA device, "
            "its family or exactly sm_%d%d are used",
            major,
            minor,
            major,
            minor,
        )


def _specificity(target: str, request: KernelRequest) -> int | None:
    if target == "portable":
        return PORTABLE
    if request.capability is None:
        return EXACT if target == device_type(request.device) else None
    if target == "cuda":
        return CUDA
    found = _TARGET.match(target)
    if found is None:
        return None
    major, minor = request.capability
    if found[3] == "f":
        return FAMILY if int(found[1]) == major and int(found[2]) <= minor else None
    return EXACT if (int(found[1]), int(found[2])) == (major, minor) else None
