"""tests/faults/README.md lists every marked test, and no id is both tested in full and left to nobody."""

from __future__ import annotations

import ast
import re

import pytest
import readme_table


def test_the_page_lists_every_marked_test() -> None:
    page = readme_table.PAGE.read_text(encoding="utf-8")
    assert readme_table.page_with_table(page) == page, "run python tests/faults/readme_table.py"


def test_marks_of_tests_of_parameters_and_of_a_gpu_are_found() -> None:
    text = """
FAULTS = [pytest.param(1, marks=pytest.mark.fault("B7")), 2]
@pytest.mark.parametrize("x", FAULTS)
@pytest.mark.fault("B3")
def test_one(x): pass
@pytest.mark.gpu
@pytest.mark.fault("B3")
def test_two(): pass
def test_three(): pass
"""
    found = list(readme_table.marked_tests(ast.parse(text)))
    assert found == [("B3", "test_one", False), ("B7", "test_one", False), ("B3", "test_two", True)]


def test_every_id_is_tested_or_left_with_a_reason(request: pytest.FixtureRequest) -> None:
    listed = request.getfixturevalue("shared") / "cases" / "public-faults.md"
    ids = set(re.findall(r"^### (B\d+) ", listed.read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bB\d+\b", readme_table.PAGE.read_text(encoding="utf-8")))
    assert sorted(ids - named) == []
