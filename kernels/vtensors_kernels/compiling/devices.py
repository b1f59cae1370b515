"""The CUDA devices of this machine as the driver's library tells them: no torch, no CuPy, no context."""

from __future__ import annotations

import ctypes

import attrs

LIBRARY = "libcuda.so.1"
# CUdevice_attribute of the CUDA driver API.
_MAJOR, _MINOR = 75, 76


@attrs.frozen(kw_only=True)
class CudaDevice:
    """One device. index: as in `cuda:0`. capability: (major, minor)."""

    index: int
    name: str
    capability: tuple[int, int]


def find_devices() -> tuple[CudaDevice, ...] | str:
    """Every device that CUDA_VISIBLE_DEVICES leaves, at least one, or the reason why there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as problem:
        return f"no NVIDIA driver ({problem})"
    count = ctypes.c_int()
    for name, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        if status := getattr(library, name)(*arguments):
            return f"the NVIDIA driver refuses {name} (CUresult {status})"
    if count.value == 0:
        return "the NVIDIA driver shows no device"
    return tuple(_device(library, index) for index in range(count.value))


def _device(library: ctypes.CDLL, index: int) -> CudaDevice:
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    library.cuDeviceGet(ctypes.byref(handle), index)
    library.cuDeviceGetName(name, len(name), handle)
    return CudaDevice(
        index=index,
        name=name.value.decode(errors="replace"),
        capability=(_attribute(library, _MAJOR, handle), _attribute(library, _MINOR, handle)),
    )


def _attribute(library: ctypes.CDLL, attribute: int, handle: ctypes.c_int) -> int:
    value = ctypes.c_int()
    library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return value.value
