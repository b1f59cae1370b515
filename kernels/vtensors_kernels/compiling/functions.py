"""Compiled kernels ready to launch: one per process, device and set of macros; the image from the cubin cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import attrs
import torch

from vtensors.plugin_candidates import own_version
from vtensors.self_test_runs import preparing
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.cubin_cache import CubinCache, cache_key, default_cache_folder
from vtensors_kernels.compiling.known_bad import tell_known_bad
from vtensors_kernels.compiling.launch import DeviceFunction, load_function
from vtensors_kernels.compiling.nvrtc import CompileError, Toolkit, compile_source, find_toolkit, options_of
from vtensors_kernels.compiling.sources import load_source

Defines = tuple[tuple[str, int], ...]
COMPILE_THREADS = 8


@attrs.frozen(kw_only=True)
class Wanted:
    """One function: file below `cuda/`, name in it, macros (name, value), dynamic shared memory in bytes."""

    source: str
    name: str
    defines: Defines = ()
    shared_bytes: int = 0


def compiled_function(
    source: str, name: str, device_index: int, defines: Mapping[str, int], shared_bytes: int = 0
) -> DeviceFunction:
    """The kernel `name` of the file `source` (such as `common/widen_fp8.cu`) on that device.

    Compiled for the device's target, or taken from the cubin cache; the same object for the same arguments.
    shared_bytes: dynamic shared memory that launches will ask for.
    Errors: CompileError without NVRTC or from the compiler, LaunchError from the driver, RequestError for a
    device below sm_80.
    """
    return _function(source, name, device_index, tuple(sorted(defines.items())), shared_bytes)


def compile_many(wanted: Sequence[Wanted], device_index: int) -> tuple[DeviceFunction, ...]:
    """The functions in order: images are compiled in threads (NVRTC releases the interpreter), then loaded.

    Errors as in `compiled_function`, from the first that fails.
    """
    target = _target(device_index)
    images = dict.fromkeys((one.source, tuple(sorted(one.defines))) for one in wanted)
    with preparing(), ThreadPoolExecutor(max_workers=COMPILE_THREADS) as pool:
        for done in [pool.submit(_image, source, target, defines) for source, defines in images]:
            done.result()
    return tuple(
        compiled_function(one.source, one.name, device_index, dict(one.defines), one.shared_bytes)
        for one in wanted
    )


def compiled_image(source: str, target: str, defines: Mapping[str, int]) -> bytes:
    """The cubin (PTX for `compute_*`) of a file for a target, from the cache where it is there; needs no GPU."""
    return _image(source, target, tuple(sorted(defines.items())))


def fingerprint(source: str, defines: Mapping[str, int], capability: tuple[int, int]) -> str:
    """What a verdict about a kernel depends on besides device and driver, as one hash.

    Source text, options, toolkit and library version: the key of the cubin cache.
    """
    options = options_of(target_of(capability), defines)
    return cache_key(load_source(source).text, options, _toolkit().key, own_version())


@lru_cache(maxsize=512)
def _function(
    source: str, name: str, device_index: int, defines: Defines, shared_bytes: int
) -> DeviceFunction:
    target = _target(device_index)
    with preparing():
        image = _image(source, target, defines)
        tell_known_bad(_toolkit().version, target)
    with torch.cuda.device(device_index):
        return load_function(image, name, target, shared_bytes=shared_bytes)


@lru_cache(maxsize=512)
def _image(source: str, target: str, defines: Defines) -> bytes:
    toolkit, text = _toolkit(), load_source(source)
    key = cache_key(text.text, options_of(target, dict(defines)), toolkit.key, own_version())
    cache = CubinCache(folder=default_cache_folder() / "cubin")
    image, _ = cache.get(key, lambda: compile_source(text, target, dict(defines), toolkit))
    return image


@lru_cache(maxsize=64)
def _target(device_index: int) -> str:
    return target_of(torch.cuda.get_device_capability(device_index))


def _toolkit() -> Toolkit:
    toolkit = find_toolkit()
    if isinstance(toolkit, str):
        raise CompileError(toolkit)
    return toolkit
