"""README, Makefile, .ci/run and the pre-commit hooks run the same commands."""

from __future__ import annotations

import re

import pytest

from project.source_tree import REPOSITORY


def _recipe(target: str) -> list[str]:
    """The command lines of a Makefile target, with BIN put in."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert match, f"the Makefile has no target {target}"
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def _plain(line: str) -> str:
    """The command without the variables that a person may set."""
    return re.sub(r" *(\$\(\w+\)|\$\{[^}]*\})", "", line).strip()


@pytest.mark.parametrize("line", _recipe("check"))
def test_ci_runs_every_line_of_make_check(line: str) -> None:
    assert f"step {line}\n" in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "step make test\n" in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nmake test\n" in (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", ["demo", "test", ".venv/demo.stamp", ".venv/test.stamp"])
def test_the_plain_lines_of_the_readme_are_those_of_the_makefile(target: str) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    for line in _recipe(target):
        if not line.startswith("touch"):
            assert _plain(line) in readme


def test_without_make_ci_runs_the_same_lines() -> None:
    ci = [_plain(line.strip()) for line in (REPOSITORY / ".ci" / "run").read_text("utf-8").splitlines()]
    for line in [*_recipe(".venv/test.stamp"), *_recipe("test")]:
        if not line.startswith("touch"):
            assert f"step {_plain(line)}" in ci


def test_the_pre_commit_hooks_need_no_remote_repository() -> None:
    config = (REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"repo: (\S+)", config) == ["local"]
    for line in _recipe("check"):
        assert f"entry: {line.removesuffix(' .')}" in config


def test_make_docs_rewrites_every_page_that_make_check_compares() -> None:
    checked = [line.removesuffix(" --check") for line in _recipe("check") if " docs/" in line]
    assert _recipe("docs") == checked
