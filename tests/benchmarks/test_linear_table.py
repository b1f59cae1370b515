"""docs/performance.md says what the committed record says."""

from __future__ import annotations

import json
from typing import Any

import linear_goals as goals
import linear_table
import pytest

from benchmarks.records import record, row


def _text(rows: list[dict[str, Any]], **more: Any) -> str:
    return linear_table.whole_text(record(rows, **more))


def test_the_page_holds_the_tables_of_the_committed_record() -> None:
    if not linear_table.RECORD.is_file():
        pytest.skip(f"no {linear_table.RECORD.name} yet: the benchmark was not run on a device")
    page = linear_table.PAGE.read_text(encoding="utf-8")
    wanted = linear_table.page_with(page, json.loads(linear_table.RECORD.read_text(encoding="utf-8")))
    assert wanted == page, "run python benchmarks/linear_table.py"


def test_the_page_has_markers_to_write_between() -> None:
    page = linear_table.PAGE.read_text(encoding="utf-8")
    written = linear_table.page_with(page, record([row("down", 1, goals.OURS, 12.5)]))
    assert written.startswith(page[: page.index(linear_table.BEGIN)])
    assert "**down**" in written
    assert linear_table.page_with(written, record([row("down", 1, goals.OURS, 12.5)])) == written


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="from benchmarks"):
        linear_table.page_with("# Performance\n", record([]))


def test_a_row_has_time_share_ratio_and_kernel() -> None:
    text = _text(
        [
            row("down", 1, goals.OURS, 12.5),
            row("down", 1, goals.OURS_APART, 14.0),
            row("down", 1, goals.MARLIN, 25.0),
            row("down", 1, goals.CUBLAS, 123.4),
        ]
    )
    cells = "| 1 | 12.50 | 80% | 1.0% | 14.00 | 25.00 | 2.00x | 123.4 | - | `linear_x` + PDL |"
    assert cells in text
    assert "vllm 0.26.0, measured in the same run" in text


def test_what_was_not_run_without_pdl_has_no_column_for_it() -> None:
    text = _text([row("down", 1, goals.OURS, 12.5), row("down", 1, goals.MARLIN, 25.0)])
    assert "without PDL" not in text
    assert "| 1 | 12.50 | 80% | 1.0% | 25.00 | 2.00x | - | - | `linear_x` + PDL |" in text


def test_a_column_that_any_shape_has_stands_in_every_table() -> None:
    rows = [row("down", 1, goals.OURS, 12.5), row("o_out", 1, goals.OURS_APART, 14.0)]
    tables = linear_table.times_tables(record(rows))
    assert [table.count("| without PDL |") for table in tables] == [1, 1]
    for table in tables:
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert widths == {11}


def test_the_implementations_that_were_run_are_named_and_published_times_are_not_among_them() -> None:
    rows = [row("down", 1, impl, 12.5) for impl in (goals.OURS, goals.CUBLAS, goals.MARLIN_SCALED)]
    failures = [{"shape": "down", "m": None, "impl": goals.SCALED_MM, "reason": "none"}]
    text = _text(rows, failures=failures)
    assert "as `--impls` takes them: `vtensors,cublas_bf16,scaled_mm_fp8`." in text
    assert "Implementations" not in _text([])


def test_the_method_names_the_implementations_of_the_committed_record() -> None:
    run = ",".join(linear_table.impls_run(json.loads(linear_table.RECORD.read_text(encoding="utf-8"))))
    page = linear_table.PAGE.read_text(encoding="utf-8")
    method = page[page.index("## Method") : page.index("## How to read it")]
    assert f"the record below was made with `--impls {run}`" in method
    assert f"--impls {run} " in page[: page.index("## Method")]


def test_scaled_times_of_marlin_are_marked() -> None:
    versions = {"torch": "2.11.0", "cupy": "14.2.0", "vtensors": "0.1.0", "marlin": None}
    text = _text([row("down", 1, goals.MARLIN_SCALED, 25.0)], versions=versions, marlin_missing="no folder")
    assert "| 25.00 (scaled) |" in text
    assert "**Marlin was not there to be measured**" in text


def test_a_run_cut_short_and_its_failures_are_told() -> None:
    failures = [{"shape": "down", "m": None, "impl": "x", "reason": "a | b\nc"}]
    text = _text([], complete=False, failures=failures)
    assert "**The run was cut short.**" in text
    assert "| down | all | x | a \\| b c |" in text


def test_missed_goals_stand_out_and_stretch_goals_come_last() -> None:
    lines = linear_table.goals_table(record([row("gate_up", 1, goals.OURS, 20.0)])).splitlines()
    assert "| M = 1: gate_up, share of the floor | 85.0 % | 50.0 % | **missed** |" in lines
    stretch = [line.startswith("| stretch") for line in lines]
    assert stretch == sorted(stretch)
    assert "| stretch: M = 1: gate_up, share of the floor | 90.0 % | 50.0 % | missed |" in lines


def test_check_says_that_a_page_is_stale_and_writing_mends_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear_table, "PAGE", tmp_path / "performance.md")
    monkeypatch.setattr(linear_table, "RECORD", tmp_path / "record.json")
    (tmp_path / "performance.md").write_text(f"a\n{linear_table.BEGIN}\n{linear_table.END}\nb\n")
    (tmp_path / "record.json").write_text(json.dumps(record([row("down", 1, goals.OURS, 12.5)])))
    assert linear_table.main(["--check"]) == 1
    assert "run python benchmarks/linear_table.py" in capsys.readouterr().err
    assert linear_table.main([]) == 0
    assert linear_table.main(["--check"]) == 0
