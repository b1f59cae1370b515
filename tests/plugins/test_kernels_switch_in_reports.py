"""`VT_KERNELS` in commands that load nothing: what a load would refuse is refused there too."""

from __future__ import annotations

import json

import pytest

from vtensors.cli import main


@pytest.mark.parametrize("words", [("kernels", "--assume", "sm_90a"), ("env",)])
@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("nvfp4:no_such_kernel", "names a kernel that is not there"),
        ("nvfp5:*", "names a scheme that is not there"),
        ("linear_nvfp4_stream", "is not `scheme:kernel`"),
    ],
)
def test_the_reports_refuse_what_a_load_refuses_in_vt_kernels(
    words: tuple[str, ...],
    rule: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VT_KERNELS", rule)
    assert main([*words, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "SwitchError"
    assert what in error["message"]
    monkeypatch.setenv("VT_KERNELS", "nvfp4:!*_wgmma")
    assert main([*words, "--json"]) == 0


def test_env_works_where_the_switches_plugin_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_PLUGINS", "-switches")
    assert main(["env", "--json"]) == 0
