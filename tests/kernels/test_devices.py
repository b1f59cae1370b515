"""The devices that the driver's library tells, with a library made up here."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from vtensors_kernels.compiling import devices
from vtensors_kernels.compiling.devices import CudaDevice, find_devices

CARDS = (("NVIDIA H200", (9, 0)), ("NVIDIA GB10", (12, 1)))


class Library:
    """What `libcuda.so.1` answers for the cards given. A status other than 0 is a refusal of cuInit."""

    def __init__(self, cards: tuple[Any, ...], status: int = 0) -> None:
        self.cards, self.status = cards, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:
        name.value = self.cards[handle.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        value._obj.value = self.cards[handle.value][1][{75: 0, 76: 1}[attribute]]
        return 0


def _use(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)


def test_every_card_has_its_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, Library(CARDS))
    assert find_devices() == (
        CudaDevice(index=0, name="NVIDIA H200", capability=(9, 0)),
        CudaDevice(index=1, name="NVIDIA GB10", capability=(12, 1)),
    )


def test_without_a_card_or_with_a_driver_that_refuses_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _use(monkeypatch, Library(()))
    assert find_devices() == "the NVIDIA driver shows no device"
    _use(monkeypatch, Library(CARDS, status=803))
    assert find_devices() == "the NVIDIA driver refuses cuInit (CUresult 803)"


def test_without_a_driver_the_reason_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LIBRARY", "libcuda-that-is-not-there.so.1")
    found = find_devices()
    assert isinstance(found, str)
    assert "libcuda-that-is-not-there.so.1" in found


@pytest.mark.gpu
def test_the_driver_and_torch_agree() -> None:
    import torch

    found = find_devices()
    assert not isinstance(found, str)
    assert len(found) == torch.cuda.device_count()
    for device in found:
        assert device.capability == torch.cuda.get_device_capability(device.index)
        assert device.name == torch.cuda.get_device_name(device.index)
