"""Compilers that are known to miscompile: told, and not refused, since every kernel's results are tested on the card.

NVRTC tells major and minor version only. The build is that of the installed package of that version; where there is
none (a system's toolkit), it is not known, and a version of which some builds are bad is told as such.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import metadata

import attrs

from vtensors_kernels.compiling.architectures import macro_of

_log = logging.getLogger("vtensors")
# Distributions that bring NVRTC, of CUDA 13 and 12.
PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


@attrs.frozen(kw_only=True)
class BadCompiler:
    """A compiler and what it does wrong.

    version: (major, minor). builds: last numbers of the package's version, None = all. targets: numbers of `sm_*`.
    fault: what was seen. fix: what to do.
    """

    version: tuple[int, int]
    builds: tuple[int, ...] | None
    targets: tuple[int, ...]
    fault: str
    fix: str


KNOWN_BAD = (
    # ggml-org/llama.cpp#28581, #28784: nvcc 13.2.51 (13.2.0) and 13.2.78 (13.2.1) for sm_120 fail 66 cases, 13.2.86
    # (13.2.2) and 13.4.92 none. sm_121 is of the same family; nothing was reported of it.
    BadCompiler(
        version=(13, 2),
        builds=(51, 78),
        targets=(120, 121),
        fault="CUDA 13.2.0 and 13.2.1 miscompile bytes read from packed words on sm_120",
        fix="install nvidia-cuda-nvrtc 13.2.86 (CUDA 13.2.2) or newer",
    ),
    # ggml-org/llama.cpp#18331: code of nvcc 13.0 at -O3 crashes on sm_121; which builds is not told.
    BadCompiler(
        version=(13, 0),
        builds=None,
        targets=(121,),
        fault="code that CUDA 13.0 optimized was seen to crash on sm_121",
        fix="install a newer nvidia-cuda-nvrtc",
    ),
)


def known_bad(version: tuple[int, int], target: str, build: int | None) -> str | None:
    """What is known against a compiler for a target such as `sm_121a`, in a line; None where nothing is.

    build: None = not known.
    """
    number = macro_of(target) // 10 if target.startswith("sm_") else 0
    for bad in KNOWN_BAD:
        if bad.version != version or number not in bad.targets:
            continue
        if bad.builds is None or build is None or build in bad.builds:
            words = f"NVRTC {version[0]}.{version[1]}" + (f".{build}" if build is not None else "")
            unknown = "" if build is not None or bad.builds is None else " (patch level unknown)"
            return f"{words}{unknown} for {target}: {bad.fault}; every kernel is tested before use; {bad.fix}"
    return None


@lru_cache(maxsize=16)
def installed_build(version: tuple[int, int]) -> int | None:
    """The last number of the version of the installed package with that major and minor one: 88 of `13.0.88`."""
    numbers = (_numbers(name) for name in PACKAGES)
    return next((found[2] for found in numbers if len(found) > 2 and found[:2] == version), None)


def installed_versions() -> list[tuple[int, int]]:
    """(major, minor) of the installed packages that bring NVRTC. Imports none of them."""
    return [(found[0], found[1]) for name in PACKAGES if len(found := _numbers(name)) > 1]


@lru_cache(maxsize=16)
def tell_known_bad(version: tuple[int, int], target: str) -> None:
    """Says once per process what is known against that compiler for the target."""
    line = known_bad(version, target, installed_build(version))
    if line is not None:
        _log.warning("%s", line)


def _numbers(distribution: str) -> tuple[int, ...]:
    try:
        words = metadata.version(distribution).split(".")
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(word) for word in words if word.isdecimal())
