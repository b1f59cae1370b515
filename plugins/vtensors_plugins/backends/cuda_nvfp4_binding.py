"""How the NVFP4 kernels of the CUDA backend are bound and tested, by kernel; imported when one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4 import packed_widening, probes, stored, wgmma_segments_form
from vtensors_kernels.nvfp4.embedding import bind_embedding
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.stream import StreamArgmax, StreamLinear
from vtensors_kernels.nvfp4.stream_probe import probe_stream
from vtensors_kernels.nvfp4.wgmma import MAX_TOKENS, WgmmaLinear, probe_wgmma
from vtensors_kernels.nvfp4.wgmma_probe import probe_wgmma_rows
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments, probe_wgmma_segments
from vtensors_kernels.widening import bind_nvfp4
from vtensors_kernels.widening_probe import probe_nvfp4
from vtensors_plugins.backends.cuda_calls import for_op, over_rows, require_norm, workspace_here

Call = Callable[..., Tensor]


def _dtype(request: KernelRequest) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype


def _plain(op: str) -> str:
    """The op without a norm before it or an argmax behind it; `linears` is one `linear` once packed."""
    op = op.removeprefix("norm_")
    return "linear" if op in ("linears", "linear_argmax") else op


def _bind_stream(packed: PackedNVFP4, request: KernelRequest) -> Call:
    op, dtype = request.op, _dtype(request)
    if op == "linear_argmax":
        return over_rows(StreamArgmax(packed, dtype))
    if not op.startswith("norm_"):
        return over_rows(StreamLinear(packed, dtype, _plain(op)))
    linear = StreamLinear(packed, dtype, _plain(op), "norm")
    return over_rows(lambda x, gain, eps: linear(x, None, gain, eps))


def _bind_wgmma(packed: PackedNVFP4, request: KernelRequest) -> Call:
    linear = WgmmaLinear(
        packed,
        _dtype(request),
        _plain(request.op),
        tokens=(request.tokens[0], request.tokens[1] or MAX_TOKENS),
        workspace=workspace_here(packed.blocks.device),
    )
    return for_op(request.op, linear, linear.normed)


def _bind_wgmma_segments(packed: PackedNVFP4, request: KernelRequest) -> Call:
    workspace = workspace_here(packed.blocks.device)
    linear = WgmmaSegments(packed, _dtype(request), _plain(request.op), workspace=workspace)
    return for_op(request.op, linear, linear.normed)


_WIDENED: Mapping[str, Callable[[PackedNVFP4, torch.dtype], Call]] = MappingProxyType(
    {
        "linear": packed_widening.bind_linear,
        "linear_add": packed_widening.bind_linear_add,
        "linear_swiglu": packed_widening.bind_linear_swiglu,
    }
)


def _bind_packed_widening(packed: PackedNVFP4, request: KernelRequest) -> Call:
    return for_op(request.op, _WIDENED[_plain(request.op)](packed, _dtype(request)))


def _bind_stored(weight: NVFP4Weight, request: KernelRequest) -> Call:
    bind = stored.bind_linear_argmax if request.op == "linear_argmax" else stored.bind_linear
    return over_rows(bind(weight, _dtype(request), max_tokens=request.tokens[1] or stored.MAX_TOKENS))


def _bind_widening(weight: NVFP4Weight, request: KernelRequest) -> Call:
    return for_op(request.op, bind_nvfp4(weight))


def _bind_embedding(weight: NVFP4Weight, _request: KernelRequest) -> Call:
    return bind_embedding(weight)


def _probe_wgmma(request: KernelRequest) -> None:
    tokens = request.tokens[0], request.tokens[1] or MAX_TOKENS
    device = torch.device(request.device)
    probe_wgmma(_shape(request), _dtype(request), _plain(request.op), device, tokens)
    probe_wgmma_rows(attrs.evolve(_without_norm(request), tokens=tokens))


def _probe_wgmma_segments(request: KernelRequest) -> None:
    require_norm(request)
    tokens = request.tokens[0], request.tokens[1] or wgmma_segments_form.MAX_TOKENS
    device = torch.device(request.device)
    probe_wgmma_segments(_shape(request), _dtype(request), _plain(request.op), device, tokens)


def _probe_packed_widening(request: KernelRequest) -> None:
    probes.probe_packed_widening(_without_norm(request))


def _without_norm(request: KernelRequest) -> KernelRequest:
    """Parts side by side are one linear, but each has its own scale: `linears` stays what it is."""
    return attrs.evolve(request, op="linears" if request.op.endswith("linears") else _plain(request.op))


def _probe_stored(request: KernelRequest) -> None:
    argmax = request.op == "linear_argmax"
    (probes.probe_linear_argmax_stored if argmax else probes.probe_linear_stored)(request)


def _probe_widening(request: KernelRequest) -> None:
    probe_nvfp4(request)


def _shape(request: KernelRequest) -> tuple[int, int]:
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    return request.shape


# Kernel -> its call from a prepared weight; kernel -> its self-test.
BINDERS: Mapping[str, Callable[[Any, KernelRequest], Call]] = MappingProxyType(
    {
        "stream": _bind_stream,
        "wgmma": _bind_wgmma,
        "wgmma_segments": _bind_wgmma_segments,
        "packed_widening": _bind_packed_widening,
        "stored": _bind_stored,
        "widening": _bind_widening,
        "embedding": _bind_embedding,
    }
)
PROBES: Mapping[str, Callable[[KernelRequest], None]] = MappingProxyType(
    {
        "stream": probe_stream,
        "wgmma": _probe_wgmma,
        "wgmma_segments": _probe_wgmma_segments,
        "packed_widening": _probe_packed_widening,
        "stored": _probe_stored,
        "widening": _probe_widening,
        "embedding": probes.probe_embedding,
    }
)
