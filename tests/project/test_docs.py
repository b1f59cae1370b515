"""The documentation agrees with the tree: its module list, its links and its index."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from project.source_tree import REPOSITORY, source_files

LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def _script(name: str) -> ModuleType:
    """A script of docs/, imported from its path."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return _script("update_structure")


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    return _script("update_generated")


def test_structure_has_one_line_per_module_that_is_the_first_sentence_of_its_docstring(
    script: ModuleType,
) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.updated(page, script.module_lines()) == page, "run python docs/update_structure.py"


def test_structure_names_every_module_once_and_none_that_is_gone() -> None:
    page = (REPOSITORY / "docs" / "structure.md").read_text(encoding="utf-8")
    named = re.findall(r"^- `(\S+\.py)` — \S", page, re.MULTILINE)
    modules = [
        path.relative_to(REPOSITORY).as_posix()
        for path in source_files()
        if path.suffix == ".py" and (path.name != "__init__.py" or path.read_text().strip())
    ]
    assert sorted(named) == sorted(modules)


def test_a_module_without_a_docstring_is_named(script: ModuleType, tmp_path: Path) -> None:
    bare = tmp_path / "core" / "vtensors" / "bare.py"
    bare.parent.mkdir(parents=True)
    bare.write_text("x = 1\n")
    with pytest.raises(ValueError, match=re.escape("core/vtensors/bare.py has no docstring")):
        script.module_lines(tmp_path)


def test_a_sentence_may_go_over_two_lines_and_ends_at_its_full_stop(
    script: ModuleType, tmp_path: Path
) -> None:
    module = tmp_path / "core" / "vtensors" / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text('"""What a\nmodule is. And more.\n\nStill more.\n"""\n')
    assert "- `core/vtensors/module.py` — What a module is." in script.module_lines(tmp_path)


def test_rewriting_replaces_only_what_is_between_the_markers(script: ModuleType) -> None:
    page = f"before\n{script.BEGIN}\n- stale\n{script.END}\nafter\n"
    assert script.updated(page, ["- new"]) == f"before\n{script.BEGIN}\n- new\n{script.END}\nafter\n"


def test_what_a_command_prints_is_what_the_pages_say(
    generated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_PLUGINS", "-hf-fp8")  # what a user has set must not reach the pages
    wanted = generated.wanted_pages()
    assert set(wanted) == {"conventions.md", "environment.md", "python-api.md", "explain.md"}
    for name, text in wanted.items():
        assert (REPOSITORY / "docs" / name).read_text(encoding="utf-8") == text, "run make docs"


def test_a_stale_page_is_named_by_check_and_rewritten_without_it(
    generated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "conventions": "# C\n\n## Activations\n\nwords\n\n| a |\n|---|\n\n1. note\n\n## Next\n",
        "env": "env\n",
        "explain": "head\n\none\n\ntwo\n",
    }
    monkeypatch.setattr(generated, "printed", lambda arguments: texts[arguments[0]])
    (tmp_path / "environment.md").write_text("env\n")
    (tmp_path / "conventions.md").write_text("stale\n")
    markers = "before\n<!-- from conventions.md: Activations -->\n{}<!-- end -->\nafter\n"
    (tmp_path / "python-api.md").write_text(markers.format("| stale |\n"))
    monkeypatch.setattr(generated, "EXAMPLES", {"explain.md": (("explain", "x"), 2)})
    example = "before\n<!-- from: vtensors explain x -->\n{}<!-- end -->\nafter\n"
    (tmp_path / "explain.md").write_text(example.format("stale\n"))
    assert generated.main(["--check"], tmp_path) == 1
    told = capsys.readouterr().err
    assert "docs/conventions.md is out of date" in told
    assert "docs/python-api.md is out of date" in told
    assert "docs/explain.md is out of date" in told
    assert "environment.md" not in told
    assert generated.main([], tmp_path) == 0
    assert (tmp_path / "conventions.md").read_text() == texts["conventions"]
    assert (tmp_path / "python-api.md").read_text() == markers.format("| a |\n|---|\n\n1. note\n")
    shown = "```console\n$ vtensors explain x\n\nhead\n\none\n\n...\n```\n"
    assert (tmp_path / "explain.md").read_text() == example.format(shown)
    assert generated.main(["--check"], tmp_path) == 0


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("--chek", 2)])
def test_the_help_of_update_kernels_needs_no_compiler(
    word: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _script("update_kernels")
    monkeypatch.setattr(script, "find_toolkit", lambda: pytest.fail("a compiler was looked for"))
    with pytest.raises(SystemExit) as ended:
        script.main([word])
    assert ended.value.code == status
    assert "--check" in "".join(capsys.readouterr())


def test_every_shape_letter_has_its_row() -> None:
    page = (REPOSITORY / "docs" / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]+) \|", page, re.MULTILINE)
    assert rows == ["M", "N", "K", "E", "B", "T", "H", "D", "V", "HV", "DK", "DV"]


def test_every_relative_link_leads_to_a_file() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    dead = [
        f"{page.relative_to(REPOSITORY)} -> {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_the_index_lists_every_page() -> None:
    listed = set(LINK.findall((REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")))
    assert {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"index.md"} == listed
