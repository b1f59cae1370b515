"""Kernels, switches, commands, and what observers are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class KernelRequest:
    """What a layer asks for: the op, the weight's scheme, the activation mode and the device.

    capability: (major, minor) of a CUDA device, None on a CPU. dtype: of activations, such as `bfloat16`.
    """

    op: str
    scheme: str
    activations: str
    device: str
    capability: tuple[int, int] | None = None
    dtype: str = "float32"


@attrs.frozen(kw_only=True)
class KernelSpec:
    """Code that computes one op on some schemes on some devices.

    op: a name from the documented op list. schemes: scheme names, or `("*",)` for anything that can
    dequantise. targets: `cpu`, `portable`, `sm_90a`, ... numerics: `reference`, `bitwise` or a tolerance.
    refuse: request -> reason why not, or None. bind: (weight, request) -> the callable put into the layer.
    cost: estimated microseconds, lower wins; the reference is last.
    """

    name: str
    op: str
    schemes: tuple[str, ...]
    targets: tuple[str, ...]
    numerics: str
    refuse: Callable[[KernelRequest], str | None]
    bind: Callable[[Any, KernelRequest], Callable[..., Any]]
    cost: float = 0.0


@attrs.frozen(kw_only=True)
class Switch:
    """An environment variable. kind: `bool`, `str`, `path`, `names`; accepted: allowed words, if closed."""

    name: str
    kind: str
    default: str
    summary: str
    accepted: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Command:
    """A subcommand of `vtensors`. load: dotted path `package.module:click_command`, imported when called."""

    name: str
    summary: str
    load: str


@attrs.frozen(kw_only=True)
class Selected:
    """Told to observers when a kernel was chosen for a module."""

    module: str
    op: str
    scheme: str
    declared: str
    executed: str
    kernel: str
    rejected: tuple[tuple[str, str], ...] = ()


@attrs.frozen(kw_only=True)
class Progress:
    """Told to observers while long work goes on. unit: `bytes`, `tensors`, `tokens`."""

    task: str
    done: int
    total: int
    unit: str
