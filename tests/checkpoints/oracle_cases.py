"""The checkpoints with oracles: those in tests/data, the bundled one, and those beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from vtensors_engine.bundled import BUNDLED_NAME, bundled_checkpoint

DATA = Path(__file__).resolve().parents[1] / "data"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "checkpoints"


@attrs.frozen(kw_only=True)
class Case:
    """One checkpoint: where its files are, and where its oracle is."""

    name: str
    path: Path
    oracle_folder: Path

    @property
    def oracle(self) -> dict[str, Any]:
        """oracle.json."""
        found: dict[str, Any] = json.loads((self.oracle_folder / "oracle.json").read_text())
        return found


def all_cases() -> list[Case]:
    """Every checkpoint with an oracle, each name once; tests/data first."""
    cases = {
        BUNDLED_NAME: Case(
            name=BUNDLED_NAME, path=bundled_checkpoint(), oracle_folder=DATA / BUNDLED_NAME / "oracle"
        )
    }
    for root in (DATA, SHARED):
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if (folder / "oracle" / "oracle.json").exists() and (folder / "config.json").exists():
                cases.setdefault(
                    folder.name, Case(name=folder.name, path=folder, oracle_folder=folder / "oracle")
                )
    return list(cases.values())
