"""The rules of changelog.d/README.md."""

from __future__ import annotations

import re

from project.source_tree import REPOSITORY

FRAGMENT = re.compile(r"\d{4}-[a-z0-9]+(-[a-z0-9]+)*\.(added|changed|deprecated|fixed|removed|security)\.md")


def test_every_fragment_is_named_by_number_slug_and_kind() -> None:
    names = [path.name for path in (REPOSITORY / "changelog.d").iterdir() if path.name != "README.md"]
    assert [name for name in names if not FRAGMENT.fullmatch(name)] == []


def test_every_fragment_is_one_to_five_lines_of_text_without_a_heading() -> None:
    for path in (REPOSITORY / "changelog.d").glob("[0-9]*.md"):
        text = path.read_text(encoding="utf-8")
        assert 1 <= len(text.strip().splitlines()) <= 5, path.name
        assert not text.startswith("#"), path.name


def test_the_name_rule_refuses_other_names() -> None:
    for name in (
        "0001-foundation.md",
        "1-a.added.md",
        "0001-A.added.md",
        "0001-a.new.md",
        "0001-a.added.txt",
    ):
        assert not FRAGMENT.fullmatch(name)
