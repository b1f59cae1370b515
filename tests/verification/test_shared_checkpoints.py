"""Real exports of three writers: no errors, and only the warnings that are true of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify_tools import run

# qkv|z of the delta net, and FP8 parts everywhere, have scales of their own; the mixed ones declare an FP8 cache
# and ship no scales for it; one matrix of `llamazero` is zero on purpose.
TRUE = {"fused-scales-differ", "missing-kv-scale"}
ZERO = "llamazero-modelopt-nvfp4"


def _names() -> list[str]:
    folder = Path(__file__).resolve().parents[3] / "shared" / "checkpoints"
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else [ZERO]


@pytest.mark.parametrize("name", _names())
def test_a_real_export_has_no_errors(name: str, shared: Path) -> None:
    report = run(shared / "checkpoints" / name)
    assert [f for f in report.findings if f.severity == "error"] == []
    assert {f.code for f in report.findings} <= (TRUE if name != ZERO else {"all-zero"})
    if "modelopt-nvfp4" in name and name != ZERO:
        assert report.findings == ()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("kjv-dense-modelopt-nvfp4", 20.0, 21.0),
        ("qwen35-llmcompressor-mixed", 20.0, 34.0),
        ("qwen35-modelopt-fp8", 31.0, 32.0),
        ("qwen35-modelopt-fp8-block", 31.0, 32.0),
        ("qwen35-modelopt-fp8-pcpt", 32.0, 34.0),
        ("qwen35-modelopt-mxfp8", 31.0, 32.0),
    ],
)
def test_a_real_export_is_as_good_as_its_scheme(name: str, low: float, high: float, shared: Path) -> None:
    family = name.partition("-")[0] if not name.startswith("kjv") else "kjv-dense"
    reference = shared / "checkpoints" / f"{family}-transformers-bf16"
    report = run(shared / "checkpoints" / name, against=reference)
    rows = [row for row in report.comparisons if row["scheme"] != "bf16"]
    assert rows
    assert all(row["verdict"].startswith("as good as") for row in rows)
    assert all(low < row["snr_db"] < high for row in rows)
    assert all(abs(row["snr_db"] - row["reach_db"]) < 0.5 for row in rows)


def test_weights_that_awq_moved_are_told_from_the_source(shared: Path) -> None:
    folder = shared / "checkpoints"
    report = run(folder / "qwen35-modelopt-nvfp4-awqlite", against=folder / "qwen35-transformers-bf16")
    assert {"worse-than-scheme", "plain-differs"} <= {finding.code for finding in report.findings}
