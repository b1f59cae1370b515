"""Launches of compiled functions through the driver: attributes, torch's current stream, prebuilt arguments.

CuPy loads the image; cuda-bindings describes the launch, because only `cuLaunchKernelEx` sets launch attributes
(programmatic dependent launch, clusters). The call itself goes to the driver's library through ctypes: the
binding's own wrapper costs more than the driver. All of it works while torch captures a CUDA graph.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from threading import Lock
from typing import Any

import attrs
import torch

from vtensors.errors import VtensorsError
from vtensors_kernels.compiling.architectures import macro_of


class LaunchError(VtensorsError):
    """The driver refused to load or launch a kernel."""


@attrs.frozen(kw_only=True)
class DeviceFunction:
    """A loaded kernel. handle: CUfunction. module: keeps the image loaded."""

    name: str
    target: str
    handle: Any
    module: Any


def may_depend(function: DeviceFunction) -> bool:
    """Whether the function waits for its predecessor itself: compiled for compute capability 9.0 or newer.

    Portable code does not, on whatever device it runs.
    """
    return macro_of(function.target) >= 900


def load_function(image: bytes, name: str, target: str, *, shared_bytes: int = 0) -> DeviceFunction:
    """The function of a cubin or PTX on the current device.

    shared_bytes: dynamic shared memory that launches will ask for. The function is told of any: together with what it
    has of its own, more than 48 KB would else be refused at launch.
    Errors: LaunchError naming function, target and the driver's word.
    """
    from cuda.bindings import driver
    from cupy.cuda import function

    module = function.Module()
    try:
        module.load(image)
        handle = driver.CUfunction(module.get_function(name).ptr)
    except Exception as problem:  # CuPy's driver error has no public base
        raise LaunchError(f"{name} cannot be loaded: {problem}", seen=f"compiled for {target}") from problem
    if shared_bytes:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(handle, attribute, shared_bytes), name)
    return DeviceFunction(name=name, target=target, handle=handle, module=module)


@attrs.define(kw_only=True)
class Launch:
    """A launch whose configuration and argument slots are built once; threads may share it, each with its stream.

    arguments: number of kernel parameters, each at most 8 bytes. constants: place of a parameter -> its value in
    every call; a call gives the others. grid and block: three numbers each. dependent: programmatic dependent launch
    (the kernel must wait for its predecessor itself).
    """

    function: DeviceFunction
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: int
    constants: Mapping[int, int] = attrs.field(factory=dict)
    shared_bytes: int = 0
    dependent: bool = False
    _config: Any = attrs.field(init=False)
    # What the calls give first, in order of the parameters, the constants behind.
    _slots: Any = attrs.field(init=False)
    _given: int = attrs.field(init=False)
    _pointers: Any = attrs.field(init=False)
    _address: int = attrs.field(init=False)
    _stream: int = attrs.field(init=False, default=-1)
    _launch: Any = attrs.field(init=False)
    _where: tuple[int, int] = attrs.field(init=False)
    # Of the slots and the stream: ctypes lets other threads run while the driver reads them.
    _one_at_a_time: Lock = attrs.field(init=False, factory=Lock, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        from cuda.bindings import driver

        self._launch = _driver_launch()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block
        config.sharedMemBytes = self.shared_bytes
        if self.dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self._config = config
        places = [i for i in range(self.arguments) if i not in self.constants]
        self._given = len(places)
        places += self.constants
        self._slots = (ctypes.c_uint64 * self.arguments)(*(self.constants.get(i, 0) for i in places))
        first = ctypes.addressof(self._slots)
        slots = (first + 8 * places.index(i) for i in range(self.arguments))
        self._pointers = (ctypes.c_void_p * self.arguments)(*slots)
        self._address = ctypes.addressof(self._pointers)
        self._where = (config.getPtr(), int(self.function.handle))

    def call(self, stream: int, *arguments: int) -> None:
        """Launch on the stream (a CUstream as an integer).

        arguments: one integer per kernel parameter that is no constant: an address, an integer, or `float_bits` of
        a float; the low bytes of each are the parameter (little-endian). Errors: LaunchError with the driver's word.
        """
        with self._one_at_a_time:
            self._slots[: self._given] = arguments
            if stream != self._stream:
                self._config.hStream = self._stream = stream
            status = self._launch(*self._where, self._address, None)
        if status:
            from cuda.bindings import driver

            _check((driver.CUresult(status),), self.function.name)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels are launched on that device: the driver launches in the context of torch's current one alone.

    Nothing to do where the device is no CUDA device, or is not there.
    """
    there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if there else nullcontext()


def current_stream(device: torch.device) -> int:
    """torch's current stream on the device, as the driver's handle. device: with its index, or the current device.

    The handle alone costs a thirtieth of torch's object, which is most of what a launch costs (H200: 0.1 us of 3.4).
    """
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(raw(torch.cuda.current_device() if device.index is None else device.index))


def max_active_clusters(function: DeviceFunction, cluster: int, threads: int, shared_bytes: int) -> int:
    """Clusters of so many blocks that run at a time on the whole current device.

    threads: of a block. shared_bytes: dynamic, of a block. Errors: LaunchError with the driver's word.
    """
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    # Any whole number of clusters: the answer does not depend on it.
    config.gridDimX, config.gridDimY, config.gridDimZ = 64 * cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    # A value of its own: the dimensions of a nested one would be set in a copy.
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
    attribute.value = value
    config.attrs = [attribute]
    config.numAttrs = 1
    result = driver.cuOccupancyMaxActiveClusters(function.handle, config)
    _check(result, function.name)
    return int(result[1])


@lru_cache(maxsize=1)
def _driver_launch() -> Any:
    """`cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void** parameters, void** extra)` of libcuda."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    launch.restype = ctypes.c_int
    return launch


def float_bits(value: float) -> int:
    """The bits of a float32 argument as `Launch.call` takes them."""
    return int.from_bytes(struct.pack("<f", value), "little")


def _check(result: tuple[Any, ...], name: str) -> None:
    if int(result[0]) != 0:
        raise LaunchError(f"{name}: the driver says {result[0].name}", seen=f"CUresult {int(result[0])}")
