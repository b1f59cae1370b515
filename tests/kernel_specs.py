"""Kernels and requests of a few words, for tests of selection. No device and no torch is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import KernelPlan, decomposer

PARTS = {
    "linears": ("linear",),
    "linear_swiglu": ("linears", "swiglu"),
    "linear_add": ("linear", "add"),
    "norm_linear_swiglu": ("rms_norm", "linear_swiglu"),
    "linear_argmax": ("linear", "argmax"),
}
DECOMPOSE = decomposer(PARTS)
SHAPE, WIDTHS = (96, 64), (64, 32)


@attrs.frozen
class Prepared:
    """A weight in some layout."""

    layout: str
    nbytes: int = 100


def request(
    op: str = "linear",
    *,
    scheme: str = "nvfp4",
    capability: tuple[int, int] | None = (9, 0),
    tokens: tuple[int, int | None] = (1, None),
    traits: frozenset[str] = frozenset(),
    device: str = "cuda:0",
) -> KernelRequest:
    """A request on a CUDA device of that capability, on a CPU where it is None."""
    return KernelRequest(
        op=op,
        scheme=scheme,
        activations="16bit",
        device=device if capability else "cpu",
        capability=capability,
        dtype="bfloat16",
        shape=SHAPE,
        parts=WIDTHS if op not in ("linear", "linear_add", "linear_argmax", "embedding") else SHAPE[:1],
        tokens=tokens,
        traits=traits,
    )


def kernel(
    name: str,
    *,
    op: str = "linear",
    schemes: tuple[str, ...] = ("nvfp4",),
    targets: tuple[str, ...] = ("cuda",),
    numerics: str = "bitwise",
    cost: float | Callable[[KernelRequest], float] = 10.0,
    layout: str = "stored",
    sums: str = "",
    tokens: tuple[int, int | None] = (1, None),
    refuse: Callable[[KernelRequest], str | None] = lambda request: None,
    prepare: Callable[[Sequence[Any], KernelRequest], Any] | None = None,
    bind: Callable[[Any, KernelRequest], Callable[..., Any]] | None = None,
    probe: Callable[[KernelRequest], None] | None = None,
    fingerprint: Callable[[KernelRequest], str] | None = None,
) -> KernelSpec:
    """A kernel whose call returns (its name, what was prepared, the arguments)."""

    def bind_own(prepared: Any, _request: KernelRequest) -> Callable[..., Any]:
        return lambda *arguments: (name, prepared, arguments)

    def prepare_own(weights: Sequence[Any], _request: KernelRequest) -> Prepared:
        return Prepared(layout)

    return KernelSpec(
        name=name,
        op=op,
        schemes=schemes,
        targets=targets,
        numerics=numerics,
        refuse=refuse,
        bind=bind or bind_own,
        cost=cost,
        layout=layout,
        sums=sums,
        prepare=prepare or (None if layout == "stored" else prepare_own),
        tokens=tokens,
        probe=probe,
        fingerprint=fingerprint or (None if probe is None else lambda request: "NVRTC 13.0 sm_90a 3fa4b2"),
    )


def reference(op: str = "linear") -> KernelSpec:
    """The reference of an op: any scheme, any device, last."""
    return kernel(
        f"{op}_reference",
        op=op,
        schemes=("*",),
        targets=("cpu", "portable"),
        numerics="reference",
        cost=1e9,
    )


def failing(words: str) -> Callable[..., Any]:
    """A function that raises RuntimeError with these words, whatever it is given."""

    def fail(*_: object) -> Any:
        raise RuntimeError(words)

    return fail


def chosen(plan: KernelPlan) -> Mapping[tuple[int, int | None], str]:
    """Rows -> kernel."""
    return {segment.tokens: segment.kernel.name for segment in plan.segments}
