"""Kernels, switches, commands, and what observers are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class KernelRequest:
    """What a layer asks for: the op, what the weight is, how it is to be multiplied and where.

    op: a name from the op list. scheme: of the weight (all parts of a fused op have one scheme).
    activations: `16bit`, `fp8-static`, `fp8-dynamic` or `fp4`. device: `cpu`, `cuda:0`, ...
    capability: (major, minor) of a CUDA device, None on a CPU. dtype: of activations, such as `bfloat16`.
    shape: (N, K) of the whole weight, the parts stacked; None where it is not known yet.
    parts: rows of each part, in order; one entry for a plain weight, empty where shape is None.
    tokens: fewest and most rows M that the kernel must serve; None = no upper bound.
    traits: what else the weight brings, of `bias`, `pre_scale`, `row_scale` (a global scale per row), `group32`,
    `block64x64` (rows and columns of a scale's block where they are not 128 x 128), `shared` (another op needs the
    stored layout too), `shared_expert` (an expert that every token has is among the weights).
    experts, chosen: of a mixture, all experts and those of a token; shape and parts are then of one expert's gate
    and up, and of its gate, up and down. 0 for other ops.
    assumed: the device is not there and is only asked about; what this machine lacks (a compiler, a driver) must
    not count against a kernel. Nothing is bound or probed for such a request.
    """

    op: str
    scheme: str
    activations: str
    device: str
    capability: tuple[int, int] | None = None
    dtype: str = "float32"
    shape: tuple[int, int] | None = None
    parts: tuple[int, ...] = ()
    tokens: tuple[int, int | None] = (1, None)
    traits: frozenset[str] = frozenset()
    assumed: bool = False
    experts: int = 0
    chosen: int = 0


@attrs.frozen(kw_only=True)
class KernelSpec:
    """Code that computes one op on some schemes on some devices.

    op: a name from the documented op list. schemes: scheme names, or `("*",)` for anything that can
    dequantize. targets: `cpu`, `portable` (any device), `cuda`, `sm_90a` (exactly), `sm_120f` (the family of
    that major version), ... numerics: `reference`, `bitwise` or a tolerance in words.
    refuse: request -> reason why not, or None.
    layout: the prepared form that the kernel reads; `stored` is the Weight itself. Kernels of one layout share
    one prepared weight. prepare: (weights, request) -> the weight in that layout, made once on the device; it
    has `nbytes`. Needed unless layout is `stored`.
    bind: (prepared, request) -> the callable put into the layer.
    sums: the order in which a row's products are added, where it is the same at any M, place and neighbour; kernels
    that name one order give a row the same bits. Empty: no promise.
    tokens: fewest and most rows M that it serves. cost: estimated microseconds at `request.tokens[0]` rows, a
    number or a function of the request; lower wins; the reference is last.
    probe: launches exactly what bind would for the request on a small random weight and raises where it fails
    or disagrees with the reference. fingerprint: request -> what a stored verdict of that probe depends on
    besides device and driver (source, options, toolkit). Without a probe a kernel is trusted, and said to be *not
    self-tested*; `VT_STRICT=untested` refuses it on a GPU. A reference needs none.
    """

    name: str
    op: str
    schemes: tuple[str, ...]
    targets: tuple[str, ...]
    numerics: str
    refuse: Callable[[KernelRequest], str | None]
    bind: Callable[[Any, KernelRequest], Callable[..., Any]]
    cost: float | Callable[[KernelRequest], float] = 0.0
    layout: str = "stored"
    prepare: Callable[[Sequence[Any], KernelRequest], Any] | None = None
    sums: str = ""
    tokens: tuple[int, int | None] = (1, None)
    probe: Callable[[KernelRequest], None] | None = None
    fingerprint: Callable[[KernelRequest], str] | None = None

    @property
    def untested(self) -> bool:
        """Whether nothing holds its results against a reference before it is used."""
        return self.probe is None and self.numerics != "reference"


@attrs.frozen(kw_only=True)
class Switch:
    """An environment variable. kind: `bool`, `str`, `path`, `names`, `seconds`; accepted: allowed words, if closed."""

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
    """Told to observers when a kernel was chosen for a module; one record per module, fused or not.

    op: what the kernel computes. asked: the op that the layer asked for; where it is another, not_fused tells
    why the asked one did not stay whole, as (op or kernel, reason). declared, executed: activation precision.
    kernel: of the smallest number of rows M; kernels: (fewest M, most M or None, kernel) for all of them.
    rejected: (kernel, reason) of those passed over. group: modules that are computed together, in the order of
    their rows. layout: the form that the kernel reads; prepared_bytes: of the whole group in every form that is kept,
    told by its first module, 0 at the others. merged: (fewest M, most M, kernel) of one that computes the group and
    its neighbours in fewer launches, so that `kernels` serve the other rows alone; None where there is none.
    """

    module: str
    op: str
    scheme: str
    declared: str
    executed: str
    kernel: str
    rejected: tuple[tuple[str, str], ...] = ()
    asked: str = ""
    kernels: tuple[tuple[int, int | None, str], ...] = ()
    layout: str = "stored"
    prepared_bytes: int = 0
    group: tuple[str, ...] = ()
    not_fused: tuple[tuple[str, str], ...] = ()
    merged: tuple[int, int, str] | None = None


@attrs.frozen(kw_only=True)
class Progress:
    """Told to observers while long work goes on. unit: `bytes`, `tensors`, `tokens`."""

    task: str
    done: int
    total: int
    unit: str
