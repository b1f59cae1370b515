"""docs/kernels.md: its first table has the kernels that `explain` chooses for the two checkpoints on an H200."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from project.source_tree import REPOSITORY
from vtensors.cli import main

PAGE = (REPOSITORY / "docs" / "kernels.md").read_text(encoding="utf-8")
CHECKPOINTS = ("Qwen3.6-27B-NVFP4", "Qwen3.6-35B-A3B-NVFP4")
# The columns of the table: fewest and most rows.
RANGES = ((1, 32), (33, 64), (65, 65))


def _row(group: dict[str, Any]) -> str:
    """The beginning of the table's row that the group belongs to."""
    if group["op"] == "experts":
        return "NVFP4: experts"
    if group["op"] == "embedding":
        return "BF16: embedding"
    return {"nvfp4": "NVFP4: dense", "fp8-tensor": "FP8: projections", "bf16": "BF16: router"}[
        group["scheme"]
    ]


def _short(kernel: str) -> str:
    """A kernel's name without its op and format, as the table has it."""
    return kernel if kernel.startswith("embedding") else re.split(r"_(?:nvfp4|fp8|plain)_", kernel)[1]


@pytest.mark.slow
def test_the_first_table_has_the_kernels_that_explain_chooses(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("VT_FP8_W8A8", "VT_MODELOPT_W4A4", "VT_PLUGINS", "VT_KERNELS", "VT_AUTOTUNE", "VT_STRICT"):
        monkeypatch.delenv(name, raising=False)
    chosen: dict[str, list[set[str]]] = defaultdict(lambda: [set() for _ in RANGES])
    for name in CHECKPOINTS:
        tool = [sys.executable, str(shared / "tools" / "phantom.py"), f"nvidia/{name}", str(tmp_path / name)]
        subprocess.run(tool, check=True, capture_output=True)
        assert main(["explain", str(tmp_path / name), "--assume", "sm_90a", "--json"]) == 0
        for group in json.loads(capsys.readouterr().out)["groups"]:
            for entry in group["kernels"]:
                first, last = entry["tokens"]
                for column, (fewest, most) in enumerate(RANGES):
                    if first <= most and (last is None or fewest <= last):
                        chosen[_row(group)][column].add(_short(entry["kernel"]))
    table = PAGE[PAGE.index("| weights |") :].partition("\n\n")[0].splitlines()[2:]
    told = {}
    for line in table:
        title, *cells = line.strip("| ").split(" | ")
        beginning = next((row for row in chosen if title.startswith(row)), title)
        told[beginning] = [set(re.findall(r"`(\w+)`", cell)) for cell in cells]
    assert told == dict(chosen)
