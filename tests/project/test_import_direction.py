"""Each of the five packages imports only those left of it, and the checker that says so finds a violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from project.import_rules import violations
from project.source_tree import REPOSITORY, package_folders


def test_no_module_imports_against_the_direction() -> None:
    assert violations(REPOSITORY) == []


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("core/vtensors/a.py", "import vtensors_formats", "may not import vtensors_formats"),
        ("core/vtensors/a.py", "def f():\n    from vtensors_engine.llm import LLM", "vtensors_engine.llm"),
        (
            "formats/vtensors_formats/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vtensors_kernels.ops",
            "a.py:3: vtensors_formats may not import vtensors_kernels.ops",
        ),
        ("kernels/vtensors_kernels/deep/a.py", "import vtensors_plugins", "deep/a.py:1: vtensors_kernels"),
        ("plugins/vtensors_plugins/a.py", "import_module('vtensors_engine.llm')", "name the module"),
        ("core/vtensors/other.py", "LAZY = {'LLM': ('vtensors_engine.llm:LLM')}", "name the module"),
        ("plugins/vtensors_plugins/a.py", "def f():\n    import cupy as cp", "only vtensors_kernels"),
        ("engine/vtensors_engine/a.py", "from cuda.bindings import driver", "only vtensors_kernels"),
        ("core/vtensors/a.py", "import torch", "only inside a function"),
        ("core/vtensors/a.py", "try:\n    from torch import nn\nexcept ImportError:\n    pass", "a.py:2"),
        ("core/vtensors/a.py", "class A:\n    import torch.nn", "only inside a function"),
        ("core/vtensors/a.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "a.py:4"),
    ],
)
def test_a_seeded_violation_is_found(tmp_path: Path, file: str, source: str, reason: str) -> None:
    _write(tmp_path, file, source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(file)
    assert reason in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/vtensors_engine/a.py", "import vtensors, vtensors_plugins, vtensors_kernels, torch"),
        ("kernels/vtensors_kernels/a.py", "import cupy\nfrom cuda.bindings import driver"),
        ("core/vtensors/_lazy.py", "LAZY = {'LLM': ('vtensors_engine.llm', 'LLM')}"),
        ("core/vtensors/a.py", "def f():\n    import torch"),
        ("core/vtensors/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("core/vtensors/a.py", "'''See vtensors_engine.llm for what runs a model.'''"),
        ("formats/vtensors_formats/a.py", "import torch\nfrom vtensors.records import Weight"),
    ],
)
def test_what_the_direction_allows_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    _write(tmp_path, file, source)
    assert violations(tmp_path) == []


def _write(repository: Path, file: str, source: str) -> None:
    for folder in package_folders(repository):
        folder.mkdir(parents=True)
    path = repository / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
