"""What a benchmark ran on, for the head of its record: device, driver, toolkit, versions, commit, switches."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vtensors_kernels.compiling.nvrtc import find_toolkit

_PATH = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")


def measured_on(commit: str = "") -> dict[str, Any]:
    """The facts. commit: where git is not there to ask; `` where neither knows."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    toolkit = find_toolkit()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "toolkit": toolkit if isinstance(toolkit, str) else toolkit.name,
        "versions": {"torch": torch.__version__, "cupy": _cupy(), "vtensors": _own_version()},
        "commit": commit or _commit(),
        "switches": switches_set(os.environ),
    }


def switches_set(environ: Mapping[str, str]) -> dict[str, str]:
    """The `VT_*` variables by name, paths cut to their last name."""
    return {name: without_paths(text) for name, text in sorted(environ.items()) if name.startswith("VT_")}


def without_paths(text: str) -> str:
    """The text with every absolute path cut to its last name: a record says nothing of the machine's folders."""
    return _PATH.sub("", text)


def _cupy() -> str:
    found = [d.version for d in metadata.distributions() if (d.name or "").lower().startswith("cupy-cuda")]
    return found[0] if found else "not installed"


def _own_version() -> str:
    """Of the source tree that holds this file, installed or not."""
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
