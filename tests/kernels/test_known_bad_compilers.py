"""Compilers that are known to miscompile: told for the cards that it is about, once, and in the reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vtensors.checkpoint import open_checkpoint
from vtensors.cli import main
from vtensors_kernels.compiling import known_bad as module
from vtensors_kernels.compiling.devices import CudaDevice
from vtensors_kernels.compiling.known_bad import installed_build, known_bad, tell_known_bad
from vtensors_kernels.compiling.nvrtc import Toolkit
from vtensors_plugins.commands import device_option, env, explain, explain_probes, kernels
from vtensors_plugins.commands.device_option import ReportDevice, report_device

NVFP4 = Path(__file__).parents[1] / "data" / "llama-llmcompressor-nvfp4a16"
RTX = CudaDevice(index=0, name="NVIDIA RTX 5090", capability=(12, 0))
Install = Callable[[str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes nvidia-cuda-nvrtc of that version the only package with NVRTC; without one where it is empty."""
    tell_known_bad.cache_clear()
    installed_build.cache_clear()

    def set_to(version: str) -> None:
        def found(name: str) -> str:
            if name == "nvidia-cuda-nvrtc" and version:
                return version
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(module.metadata, "version", found)
        installed_build.cache_clear()

    return set_to


@pytest.mark.fault("B83")
@pytest.mark.parametrize(
    ("version", "build", "target", "words"),
    [
        ((13, 2), 51, "sm_120a", "NVRTC 13.2.51 for sm_120a: CUDA 13.2.0 and 13.2.1 miscompile"),
        ((13, 2), 78, "sm_121a", "NVRTC 13.2.78 for sm_121a"),
        ((13, 2), None, "sm_120a", "NVRTC 13.2 (patch level unknown) for sm_120a"),
        ((13, 2), 86, "sm_120a", None),
        ((13, 2), 51, "sm_90a", None),
        ((13, 2), 51, "compute_80", None),
        (
            (13, 0),
            88,
            "sm_121a",
            "NVRTC 13.0.88 for sm_121a: code that CUDA 13.0 optimized was seen to crash",
        ),
        ((13, 0), None, "sm_121a", "NVRTC 13.0 for sm_121a"),
        ((13, 0), 88, "sm_120a", None),
        ((13, 5), None, "sm_121a", None),
    ],
)
def test_a_known_bad_compiler_is_told_for_the_cards_that_it_is_about(
    version: tuple[int, int], build: int | None, target: str, words: str | None
) -> None:
    found = known_bad(version, target, build)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(words)
        assert "install " in found


@pytest.mark.fault("B83")
def test_a_load_says_it_once(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("13.2.51")
    with caplog.at_level(logging.WARNING, "vtensors"):
        for _ in range(3):
            tell_known_bad((13, 2), "sm_120a")
            tell_known_bad((13, 2), "sm_90a")
    (line,) = caplog.messages
    assert line.startswith("NVRTC 13.2.51 for sm_120a")


@pytest.mark.parametrize(
    ("installed", "build"), [("13.2.86", 86), ("13.0.88", None), ("13.2", None), ("", None)]
)
def test_the_build_is_that_of_the_package_of_the_same_version(
    install: Install, installed: str, build: int | None
) -> None:
    install(installed)
    assert installed_build((13, 2)) == build


@pytest.mark.fault("B83")
def test_a_patch_release_compiles_anew() -> None:
    old, new = (Toolkit(version=(13, 2), targets=(120,), build=build) for build in (78, 86))
    assert old.key != new.key
    assert old.name == new.name == "NVRTC 13.2"


@pytest.mark.fault("B83")
def test_env_warns_of_the_installed_compiler_on_the_cards_that_are_here(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("13.2.78")
    monkeypatch.setattr(env, "find_devices", lambda: (RTX,))
    assert main(["env", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["warnings"]
    assert line.startswith("NVRTC 13.2.78 for sm_120a")
    assert main(["env"]) == 0
    assert line in capsys.readouterr().out
    install("13.2.86")
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


@pytest.mark.fault("B83")
def test_kernels_warns_of_the_compiler_for_the_device_that_it_reports_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Toolkit(version=(13, 2), targets=(90, 120, 121), build=None)
    monkeypatch.setattr(kernels, "find_toolkit", lambda: found)
    monkeypatch.setattr(device_option, "find_devices", lambda: (RTX,))
    assert main(["kernels", "--json"]) == 0
    assert "patch level unknown" in json.loads(capsys.readouterr().out)["compiler"]["doubt"]
    assert main(["kernels"]) == 0
    assert "warning   NVRTC 13.2 (patch level unknown) for sm_120a" in capsys.readouterr().out
    assert main(["kernels", "--assume", "sm_90a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiler"]["doubt"] is None


@pytest.mark.fault("B83")
def test_explain_warns_of_the_compiler_on_a_card_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Toolkit(version=(13, 2), targets=(90, 120), build=51)
    monkeypatch.setattr(explain, "find_toolkit", lambda: found)
    monkeypatch.setattr(device_option, "find_devices", lambda: "no NVIDIA driver")
    checkpoint = open_checkpoint(NVFP4)
    device = report_device(None, "sm_120a")
    assert explain.explained(checkpoint, device).warnings == ()

    def untouched(checkpoint: Any, groups: Any) -> Any:
        return groups

    monkeypatch.setattr(explain_probes, "probed", untouched)
    monkeypatch.setattr(ReportDevice, "is_probed", property(lambda self: True))
    explanation = explain.explained(checkpoint, device)
    (line,) = explanation.warnings
    assert line.startswith("NVRTC 13.2.51 for sm_120a")
    assert any(text.startswith("warning: NVRTC 13.2.51") for text in explain.text_lines(explanation, 100))
