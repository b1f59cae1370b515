"""docs/engine.md: its examples run and print what they say, and it names files, kernels and numbers that there are."""

from __future__ import annotations

import doctest
import re

import pytest

from project.source_tree import REPOSITORY
from vtensors_engine.cuda.runner import AHEAD, CHUNK_TOKENS
from vtensors_engine.pages import PAGE_SIZE
from vtensors_engine.rows import BUCKETS

PAGE = (REPOSITORY / "docs" / "engine.md").read_text(encoding="utf-8")


def test_every_example_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("VT_DEBUG_NAN", "VT_FP8_W8A8", "VT_MODELOPT_W4A4", "VT_PLUGINS", "VT_STRICT"):
        monkeypatch.delenv(name, raising=False)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "engine.md", None, 0)
    assert len(examples.examples) > 6
    assert doctest.DocTestRunner().run(examples).failed == 0, capsys.readouterr().out


def test_the_numbers_are_those_of_the_code() -> None:
    told = re.search(r"one for each of ([\d, ]+) and (\d+) rows", PAGE)
    assert told is not None
    assert (*map(int, told[1].split(", ")), int(told[2])) == BUCKETS
    assert f"at most {CHUNK_TOKENS} tokens" in PAGE
    assert AHEAD == 2, "the page says two steps"
    assert f"in pages of {PAGE_SIZE} tokens" in PAGE
    assert f"More than {BUCKETS[-1]} sequences do not run at a time" in PAGE.replace("\n", " ")


def test_every_file_of_the_engine_on_cuda_is_named() -> None:
    table = PAGE[PAGE.index("## To change it") :]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall("`(.*?)`", row)
    }
    folder = REPOSITORY / "engine" / "vtensors_engine"
    assert [name for name in sorted(named) if not (folder / name).is_file()] == []
    found = {path.relative_to(folder).as_posix() for path in (folder / "cuda").glob("*.py")} - {
        "cuda/__init__.py"
    }
    assert sorted(found - named) == []


@pytest.mark.parametrize(("layers", "heads", "width"), [(48, 48, 10240), (30, 32, 8192)])
def test_the_bytes_of_a_slot_are_those_of_its_states(layers: int, heads: int, width: int) -> None:
    size = layers * (heads * 128 * 128 * 4 + 4 * width * 2)
    assert f"{size / 1e6:.0f} MB" in PAGE


@pytest.mark.parametrize(("layers", "kv_heads"), [(16, 4), (10, 2)])
def test_the_bytes_of_a_token_are_those_of_its_keys_and_values(layers: int, kv_heads: int) -> None:
    for itemsize in (2, 1):
        assert f"{layers * 2 * kv_heads * 256 * itemsize:,} B" in PAGE
