from __future__ import annotations

import re
from pathlib import Path

import pytest

from vtensors.plugin_loading import HOOK_NAMES

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = DOCS / "examples" / "vtensors-int8-rows"
PAGE = (DOCS / "writing-a-plugin.md").read_text()
SHOWN = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(("file", "text"), SHOWN, ids=[file for file, _ in SHOWN])
def test_the_code_shown_is_the_packages_file(file: str, text: str) -> None:
    assert text == (PACKAGE / file).read_text()


def test_every_file_of_the_package_is_shown() -> None:
    files = {
        path.relative_to(PACKAGE).as_posix()
        for pattern in ("pyproject.toml", "src/*/*.py", "tests/*.py")
        for path in PACKAGE.glob(pattern)
    }
    assert {file for file, _ in SHOWN} == files


def test_every_hook_is_listed() -> None:
    assert re.findall(r"^\| `(vtensors_\w+)` \|", PAGE, flags=re.MULTILINE) == list(HOOK_NAMES)


def test_the_plugin_is_short() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.glob("src/*/*.py"))
    assert lines < 180
