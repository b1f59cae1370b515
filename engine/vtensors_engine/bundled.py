"""The checkpoint that ships with the package: a small trained model, for a first run without a download."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from vtensors.errors import RequestError

BUNDLED_NAME = "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn"


def bundled_checkpoint() -> Path:
    """Its directory. Raises RequestError where the installation lacks it."""
    path = Path(str(resources.files("vtensors_engine") / "bundled" / BUNDLED_NAME))
    if not (path / "config.json").is_file():
        raise RequestError(
            "the bundled checkpoint is not installed",
            file=str(path),
            seen="no such directory",
            accepted="an installation with its data files",
            fix="install the wheel or a full checkout, or name a model",
        )
    return path
