"""The Hub cache where no variable names one."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtensors.conversion.output import check_destination, hub_cache_of
from vtensors.errors import OutputError


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HOME", ".cache/huggingface/hub"), ("XDG_CACHE_HOME", "huggingface/hub"), ("HF_HOME", "hub")],
)
def test_the_hub_cache_is_known_where_no_variable_names_it(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(OutputError, match="inside of a Hub cache"):
        check_destination(tmp_path / below / "mine", None, overwrite=False)
    assert hub_cache_of(tmp_path / "elsewhere") is None
