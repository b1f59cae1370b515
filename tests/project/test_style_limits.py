"""Limits that keep a file readable, and words that must not be in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from project.source_tree import REPOSITORY, files_under, source_files

TEXT = {".py", ".md", ".toml", ".cu", ".cuh", ".jinja", ".txt", ".yaml", ".yml", ".json", ".cfg"}

# Written in pieces, so that this file does not hold what it forbids.
UNFINISHED = re.compile("|".join((r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", "NotImplemented" + "Error")))
MACHINE = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:wo" + "rk|tm" + "p|ro" + r"ot|ho" + r"me/\w+)/",
            r"py" + r"pi\.org",
            "python" + r"hosted\.org",
            r"registry\.npm" + r"js\.org",
            "download" + r"\.pytorch\.org",
        )
    )
)


def _code() -> list[Path]:
    return [path for path in source_files() if path.suffix in {".py", ".cu", ".cuh"}]


def _texts() -> list[Path]:
    folders = [REPOSITORY / name for name in ("docs", "tests", "benchmarks", "changelog.d", ".ci")]
    paths = [*source_files(), *(path for folder in folders for path in files_under(folder))]
    top = [path for path in REPOSITORY.iterdir() if path.is_file()]
    data = REPOSITORY / "tests" / "data"
    return [
        path
        for path in [*paths, *top]
        if (path.suffix in TEXT or path.name in {"Makefile", "run"}) and data not in path.parents
    ]


def _matches(paths: list[Path], pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(REPOSITORY)}:{number}: {match[0]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def test_every_source_file_is_under_300_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in _code()}
    assert {str(path.relative_to(REPOSITORY)): n for path, n in lengths.items() if n >= 300} == {}


def test_nothing_is_left_unfinished() -> None:
    assert _matches(_code(), UNFINISHED) == []


def test_no_text_names_a_machine_path_or_a_package_registry() -> None:
    assert _matches(_texts(), MACHINE) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (UNFINISHED, "# TO" + "DO later"),
        (UNFINISHED, "raise NotImplemented" + "Error"),
        (MACHINE, 'open("/tm' + 'p/x")'),
        (MACHINE, "see /wo" + "rk/main/core"),
        (MACHINE, "--index-url https://py" + "pi.org/simple"),
    ],
)
def test_the_patterns_find_what_they_forbid(pattern: re.Pattern[str], line: str) -> None:
    assert pattern.search(line)


def test_relative_paths_are_not_machine_paths() -> None:
    assert MACHINE.search("tests/tm" + "p/x and ./wo" + "rk/y and framework/ro" + "ot/z") is None
