"""Which card a verdict belongs to, and when kernels are timed at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vtensors
from vtensors_kernels import self_tests
from vtensors_kernels.self_tests import measured_costs, verdicts_for

CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-llmcompressor-nvfp4a16"
CUDA = torch.device("cuda:0")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One card, a driver's release line, and an empty cache folder."""
    found = SimpleNamespace(name="A card", uuid="1234-5678")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    release = tmp_path / "version"
    release.write_text("NVRM version: 580.95.05\nGCC version: 14\n")
    monkeypatch.setattr(self_tests, "_DRIVER_RELEASE", release)
    monkeypatch.setenv("VT_CACHE_DIR", str(tmp_path / "cache"))
    return release


def test_a_verdict_names_card_driver_and_the_distribution_of_each_kernel(card: Path) -> None:
    checkpoint = vtensors.open_checkpoint(CHECKPOINT)
    verdicts = verdicts_for(checkpoint, CUDA)
    assert verdicts is not None
    assert verdicts.device is not None
    assert (verdicts.device.name, verdicts.device.uuid) == ("A card", "1234-5678")
    assert verdicts.device.driver.endswith("NVRM version: 580.95.05")
    assert verdicts.folder == card.parent / "cache"
    assert "vtensors" in verdicts.versions["linear_reference"]
    before = verdicts.device
    card.write_text("NVRM version: 590.10\n")
    assert self_tests.device_identity(CUDA) != before
    card.unlink()
    assert self_tests.device_identity(CUDA).uuid == "1234-5678"


def test_a_cpu_has_neither_verdicts_nor_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_AUTOTUNE", "1")
    checkpoint = vtensors.open_checkpoint(CHECKPOINT)
    verdicts = verdicts_for(checkpoint, torch.device("cpu"))
    assert verdicts is None
    assert measured_costs(checkpoint, verdicts) is None


@pytest.mark.parametrize("flag", ["0", "1"])
def test_kernels_are_timed_only_under_the_switch(
    card: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv("VT_AUTOTUNE", flag)
    checkpoint = vtensors.open_checkpoint(CHECKPOINT)
    found = measured_costs(checkpoint, verdicts_for(checkpoint, CUDA))
    assert (found is not None) is (flag == "1")
