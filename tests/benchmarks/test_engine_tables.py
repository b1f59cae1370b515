"""The pages' tables of whole models are those of the committed records."""

from __future__ import annotations

import engine_tables
import pytest


@pytest.mark.parametrize(
    ("name", "marker", "text"),
    engine_tables.SECTIONS,
    ids=[marker for _, marker, _ in engine_tables.SECTIONS],
)
def test_the_page_says_what_the_records_say(name: str, marker: str, text: engine_tables.Text) -> None:
    page = (engine_tables.REPOSITORY / "docs" / name).read_text(encoding="utf-8")
    wanted = engine_tables.page_with(page, marker, text(engine_tables.RESULTS))
    assert wanted == page, "run python benchmarks/engine_tables.py"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="has no"):
        engine_tables.page_with("nothing", "engine", "text")
