"""Random weights of the shape that a request asks for: what kernels are timed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors.records import KernelRequest
from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight, PlainWeight
from vtensors_formats.activations import ActivationQuantizer, FP4Activation, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_formats.weight import Weight

_BLOCK = (128, 128)
_MX_GROUP = 32
# E8M0 bytes of 2^-10 .. 2^-6.
_EXPONENTS = (117, 122)

Maker = Callable[[int, KernelRequest], Weight]


def random_weights(request: KernelRequest) -> list[Weight]:
    """One random weight [rows, K] per part of the request, on its device, with the traits it names; for `experts` gate,
    up and down of every expert in turn.

    Codes take every value, zero included; scales are such that outputs stay in range. Errors: RequestError for a
    request without shape, a scheme that is not built in, and activations that the scheme never has.
    """
    if request.shape is None:
        raise RequestError("a weight needs a shape", seen="a request without one")
    make = _MAKERS.get(request.scheme)
    if make is None:
        raise RequestError(
            "no random weight can be made of this scheme", seen=request.scheme, accepted=", ".join(_MAKERS)
        )
    device, weights = request.device, []
    for rows, k in _sizes(request):
        asked = attrs.evolve(request, shape=(rows, k), parts=(rows,)) if request.experts else request
        weight = attrs.evolve(make(rows, asked), activation=_activation(request))
        if "bias" in request.traits:
            weight = attrs.evolve(weight, bias=torch.randn(rows, device=device))
        if "pre_scale" in request.traits:
            weight = attrs.evolve(weight, pre_scale=torch.ones(k, device=device))
        weights.append(weight)
    return weights


def _sizes(request: KernelRequest) -> list[tuple[int, int]]:
    """(rows, columns) of each weight."""
    k = _k(request)
    if not request.experts:
        return [(rows, k) for rows in request.parts]
    first, up, down = request.parts
    return [(first, k), (up, k), (down, first)] * (request.experts + ("shared_expert" in request.traits))


def _nvfp4(rows: int, request: KernelRequest) -> Weight:
    k, device = _k(request), request.device
    group = 32 if "group32" in request.traits else 16
    per_row = "row_scale" in request.traits and len(request.parts) == 1
    return NVFP4Weight(
        codes=torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device),
        block_scale=torch.empty(rows, k // group, device=device).uniform_(24, 160).to(torch.float8_e4m3fn),
        global_scale=torch.full((rows, 1) if per_row else (), 1 / 8192, device=device),
    )


def _fp8(rows: int, request: KernelRequest) -> Weight:
    k, device = _k(request), request.device
    shape: tuple[int, ...] = (rows, 1) if request.scheme == "fp8-row" else ()
    block = _BLOCK if request.scheme == "fp8-block" else None
    if block is not None:
        shape = (-(-rows // block[0]), -(-k // block[1]))
    return FP8Weight(codes=_e4m3(rows, k, device), scale=torch.full(shape, 1e-3, device=device), block=block)


def _mxfp8(rows: int, request: KernelRequest) -> Weight:
    k, device = _k(request), request.device
    exponents = torch.randint(*_EXPONENTS, (rows, k // _MX_GROUP), dtype=torch.uint8, device=device)
    return MXFP8Weight(codes=_e4m3(rows, k, device), scale=exponents)


def _plain(rows: int, request: KernelRequest) -> Weight:
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[request.scheme]
    return PlainWeight(tensor=torch.randn(rows, _k(request), device=request.device).mul_(0.02).to(dtype))


_MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "nvfp4": _nvfp4,
        "fp8-tensor": _fp8,
        "fp8-row": _fp8,
        "fp8-block": _fp8,
        "mxfp8": _mxfp8,
        "bf16": _plain,
        "f16": _plain,
        "f32": _plain,
    }
)
# Those that a random weight can be made of.
SCHEMES = frozenset(_MAKERS)


def _activation(request: KernelRequest) -> ActivationQuantizer | None:
    scale = torch.tensor(0.01, device=request.device)
    match request.activations, request.scheme:
        case "16bit", _:
            return None
        case "fp4", "nvfp4":
            return FP4Activation(global_scale=scale)
        case "fp8-static", _:
            return FP8StaticActivation(scale=scale)
        case "fp8-dynamic", "mxfp8":
            return MXFP8Activation()
        case "fp8-dynamic", "fp8-block":
            return FP8GroupActivation()
        case "fp8-dynamic", _:
            return FP8TokenActivation()
        case activations, scheme:
            raise RequestError("no such pair", seen=f"{activations} activations on {scheme} weights")


def _e4m3(rows: int, k: int, device: str) -> Tensor:
    return torch.empty(rows, k, device=device).uniform_(-200, 200).to(torch.float8_e4m3fn)


def _k(request: KernelRequest) -> int:
    return request.shape[1] if request.shape is not None else 0
