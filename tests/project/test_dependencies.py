"""What is declared is imported and what is imported is declared, with a reason for each exception."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from project.import_rules import DEVICE_MODULES
from project.source_tree import PACKAGES, REPOSITORY, files_under, source_files

# numpy: torch itself uses it, and without it the first tensor prints a warning. safetensors: with it users' own
# scripts and the tests read and write checkpoints; our header reader is our own.
NOT_IMPORTED = {"numpy", "safetensors"}


def _declared(extra: str = "dev") -> tuple[set[str], set[str]]:
    """Module names of the run-time dependencies and of an extra; each is its distribution's name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return _names(project["dependencies"]), _names(project["optional-dependencies"][extra])


def _names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", line)[0].lower().replace("-", "_") for line in requirements}


def _third_party(paths: Iterable[Path]) -> set[str]:
    """Top-level modules that the files import, at any depth, less our own and the standard library's."""
    found: set[str] = set()
    for path in paths:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(PACKAGES) - set(sys.stdlib_module_names) - set(DEVICE_MODULES)


def test_the_packages_import_what_is_declared_and_no_more() -> None:
    needed, _ = _declared()
    assert _third_party(source_files()) == needed - NOT_IMPORTED


def test_the_tests_import_only_what_the_dev_extra_brings() -> None:
    needed, dev = _declared()
    tests = REPOSITORY / "tests"
    files = [path for path in files_under(tests) if tests / "data" not in path.parents]
    own = {path.stem for path in (*tests.iterdir(), *files)}
    # The example packages are put on the path, or installed, by the tests that use them.
    own |= {path.name for path in (REPOSITORY / "docs" / "examples").glob("*/src/*")}
    own |= {path.stem for path in (REPOSITORY / "benchmarks").iterdir()}
    imported = _third_party(files)
    assert imported - own - needed - dev == set()


def test_every_direct_dependency_has_a_tested_version() -> None:
    needed, dev = _declared()
    cuda = _declared("cuda13")[1] | _declared("disassembly")[1]
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = _names(line for line in pins if line and not line.startswith("#"))
    assert needed | dev | cuda == pinned
