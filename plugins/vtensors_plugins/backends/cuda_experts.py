"""The experts of a mixture on CUDA with 16-bit activations: `experts_nvfp4_grouped` and `experts_fp8_grouped`.

All experts of a layer are packed into two matrices at load. A token's result is the same bits at any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.kernel_targets import device_name
from vtensors.records import KernelRequest, KernelSpec
from vtensors_plugins.backends.cuda_fp8 import SCHEMES as FP8_SCHEMES
from vtensors_plugins.backends.cuda_nvfp4 import NUMERICS
from vtensors_plugins.backends.cuda_requests import fingerprint_line, refusal

if TYPE_CHECKING:
    from vtensors_formats.weight import Weight
    from vtensors_kernels.experts.packed import PackedExperts

Call = Callable[..., Any]
# Weights per scale that the kernels know; rows of a scale's block where a request names none.
_GROUPS, _USUAL_BLOCK = (16, 32), (128, 128)
_SCALE_ROWS, _SCALE_COLUMNS = 4, 128
_OLDEST = (8, 0)


def experts_kernels() -> list[KernelSpec]:
    """The kernels of the op `experts`."""
    return [
        _spec("experts_nvfp4_grouped", ("nvfp4",), "nvfp4-packed-experts"),
        _spec("experts_fp8_grouped", FP8_SCHEMES, "fp8-packed-experts"),
    ]


def _spec(name: str, schemes: tuple[str, ...], layout: str) -> KernelSpec:
    return KernelSpec(
        name=name,
        op="experts",
        schemes=schemes,
        targets=("cuda",),
        numerics=NUMERICS,
        refuse=_refuse,
        bind=_bind,
        cost=_cost,
        layout=layout,
        prepare=_prepare,
        sums="experts-eight-segments",
        probe=_probe,
        fingerprint=_fingerprint,
    )


def _prepare(weights: Sequence[Weight], request: KernelRequest) -> PackedExperts:
    from vtensors_kernels.experts.packed import pack_experts

    return pack_experts(weights, request.experts)


def _bind(packed: PackedExperts, request: KernelRequest) -> Call:
    import torch

    from vtensors_kernels.experts.launches import GroupedExperts

    return GroupedExperts(packed, getattr(torch, request.dtype))


def _cost(request: KernelRequest) -> float:
    from vtensors_kernels.experts.costs import experts_cost

    return experts_cost(request)


def _probe(request: KernelRequest) -> None:
    from vtensors_kernels.experts.probe import probe_experts

    probe_experts(request)


def _fingerprint(request: KernelRequest) -> str:
    from vtensors_kernels.experts.probe import fingerprint_experts

    return fingerprint_line(request, fingerprint_experts(request))


# ---- why not


def _refuse(request: KernelRequest) -> str | None:
    for trait in ("bias", "pre_scale"):
        if trait in request.traits:
            return f"knows experts without {trait.replace('_', '-')}"
    if request.shape is not None:
        from vtensors_kernels.compiling.architectures import target_of
        from vtensors_kernels.experts.form import most_experts

        most = most_experts(target_of(request.capability or _OLDEST))
        width, k = request.shape[0] // 2, request.shape[1]
        if width % 16 or k % 16:
            return f"needs features to be multiples of 16, not {k} and {width}"
        if request.experts > most:
            return f"knows up to {most} experts on {device_name(request)}, not {request.experts}"
        if request.scheme == "mxfp8" and (width % 32 or k % 32):
            return f"needs whole groups of 32, not {k} and {width} features"
        if request.scheme == "fp8-block" and (reason := _refuse_block(request.traits, width, k)):
            return reason
    known = {f"group{size}" for size in _GROUPS}
    for trait in sorted(request.traits):
        if trait.startswith("group") and trait not in known:
            return f"knows groups of {' or '.join(map(str, _GROUPS))}, not of {trait.removeprefix('group')}"
    return refusal(request)


def _refuse_block(traits: frozenset[str], width: int, hidden: int) -> str | None:
    named = [trait.removeprefix("block").split("x") for trait in traits if trait.startswith("block")]
    rows, columns = (int(named[0][0]), int(named[0][1])) if named else _USUAL_BLOCK
    if rows % _SCALE_ROWS or columns % _SCALE_COLUMNS:
        accepted = f"multiples of {_SCALE_ROWS} rows and {_SCALE_COLUMNS} columns"
        return f"knows blocks of {accepted}, not of {rows} x {columns}"
    if width % rows or hidden % rows:
        return f"needs whole blocks of {rows} rows in every expert, not {width} and {hidden} rows"
    return None
