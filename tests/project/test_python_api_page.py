"""docs/python-api.md: its examples run and print what they say, and its tables name what there is."""

from __future__ import annotations

import doctest
import re

import attrs
import pytest

import vtensors
from project.source_tree import REPOSITORY
from vtensors.errors import VtensorsError
from vtensors_engine.sampling import SamplingParams

PAGE = (REPOSITORY / "docs" / "python-api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_example_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("VT_FP8_W8A8", "VT_MODELOPT_W4A4", "VT_PLUGINS", "VT_STRICT"):
        monkeypatch.delenv(name, raising=False)
    examples = doctest.DocTestParser().get_doctest("\n".join(EXAMPLES), {}, "python-api.md", None, 0)
    assert len(examples.examples) > 30
    result = doctest.DocTestRunner().run(examples)
    assert result.failed == 0, capsys.readouterr().out


def test_the_table_of_errors_names_every_one() -> None:
    listed = re.findall(r"^\| `(\w+Error)` \|", PAGE, re.MULTILINE)
    public = [error for error in VtensorsError.__subclasses__() if error.__module__ == "vtensors.errors"]
    assert set(listed) == {error.__name__ for error in public}
    assert [name for name in listed if not hasattr(vtensors, name)] == []


def test_the_table_of_sampling_parameters_has_each_field_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    for field in attrs.fields(SamplingParams):
        assert listed[field.name] == repr(field.default)
