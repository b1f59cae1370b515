"""The self-test of the grouped experts: a few experts of the request's shape, every way that their launches go.

Outputs start as NaN; each token must be the same bits in every batch, and near the reference.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats.weight import Weight
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.functions import fingerprint
from vtensors_kernels.experts.batch_form import MOST_TOKENS, gate_up_form, outputs_form
from vtensors_kernels.experts.compiled import (
    FINISH,
    GROUP,
    batch_defines,
    batch_sources,
    down_defines,
    linear_defines,
    sources_of,
)
from vtensors_kernels.experts.form import DIRECT_PAIRS, MOST_PAIRS, down_form, form_for
from vtensors_kernels.experts.launches import GroupedExperts
from vtensors_kernels.experts.packed import pack_experts
from vtensors_kernels.fp8.packed import SCALES_OF
from vtensors_kernels.fp8.probes import random_fp8
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.nvfp4.probes import random_weight
from vtensors_kernels.packed_matrix import PackedFormat
from vtensors_kernels.probing import TOLERANCES
from vtensors_kernels.reference.swiglu import swiglu

# The activations between the linears are rounded too, and differ where silu's exponential does.
_ROUNDINGS = 2
_FACTORS = (1.0, 0.75, 1.5)


def probe_experts(request: KernelRequest) -> None:
    """Raises VtensorsError where the kernels disagree with the reference or with themselves."""
    (n, k), top = _shape(request), max(1, request.chosen)
    experts, shared = top + 1, "shared_expert" in request.traits
    weights = random_experts(request, experts + shared)
    dtype: torch.dtype = getattr(torch, request.dtype)
    call = GroupedExperts(pack_experts(weights, experts), dtype)
    # One token; several in one launch; batches; found by blocks; grouped, more than 32 of an expert.
    most_found = MOST_PAIRS // top
    batches = DIRECT_PAIRS // top, min(MOST_TOKENS, most_found)
    sizes = sorted({1, 3, *batches, DIRECT_PAIRS // top + 1, most_found, most_found + 40})
    most, source = sizes[-1], torch.Generator().manual_seed(n + k)
    x = torch.randn(most, k, generator=source).to(dtype).to(request.device)
    order = torch.rand(most, experts, generator=source).argsort(-1)[:, :top]
    chosen = order.to(torch.int32).to(request.device)
    router = torch.rand(most, top, generator=source)
    router = (router / router.sum(-1, keepdim=True)).to(request.device)
    # A column of wider rows, as a router's linear makes it.
    gate = torch.randn(most, 3, generator=source).to(dtype).to(request.device)[:, 1:2]
    beside = torch.randn(most, k, generator=source).to(dtype).to(request.device)
    given = None if shared else beside

    def outputs(m: int) -> Tensor:
        out = torch.full((m, k), float("nan"), dtype=dtype, device=x.device)
        others = None if given is None else given[:m]
        return call(x[:m], chosen[:m], router[:m], gate[:m], others, beside[:m], out)

    whole = outputs(most)
    for m in sizes[:-1]:
        if not torch.equal(outputs(m), whole[:m]):
            raise VtensorsError(f"the self-test failed: rows at M = {m} differ from those at M = {most}")
    wanted = _reference(weights, experts, x, chosen, router, gate, given, beside)
    error = float(((whole.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
    accepted = TOLERANCES[dtype] * _ROUNDINGS
    # Written so that NaN fails.
    if not error < accepted:
        raise VtensorsError(
            "the self-test failed: experts", seen=f"relative error {error:.1e}", accepted=f"{accepted}"
        )


def fingerprint_experts(request: KernelRequest) -> str:
    """What a verdict depends on: sources, options and toolkit of every form that the request may be given."""
    (n, k), capability = _shape(request), request.capability or (8, 0)
    f16, packed_format = int(request.dtype == "float16"), _format(request)
    (linear, _), (down, _) = sources_of(packed_format)
    found = [fingerprint(FINISH[0], {"VT_F16": f16}, capability), fingerprint(GROUP[0], {}, capability)]
    for many in (False, True):
        for epilogue, columns in enumerate((k, n // 2)):
            form = form_for(columns, packed_format.block_bytes, many=many)
            defines = linear_defines(form, packed_format, f16, epilogue)
            found.append(fingerprint(linear, defines, capability))
    size, target = packed_format.block_bytes, target_of(capability)
    found.append(fingerprint(down, down_defines(down_form(n // 2, size), packed_format, f16), capability))
    forms = gate_up_form(k, size, target), outputs_form(n // 2, size, target)
    for (source, _), batch in zip(batch_sources(packed_format), forms, strict=True):
        found.append(fingerprint(source, batch_defines(batch, packed_format, f16), capability))
    return " ".join(found)


def random_experts(request: KernelRequest, count: int) -> list[Weight]:
    """gate, up and down of so many experts of the request's shape, on its device, with a scale each."""
    (n, k), weights = _shape(request), list[Weight]()
    for index in range(count):
        for part, shape in enumerate(((n // 2, k), (n // 2, k), (k, n // 2))):
            asked = attrs.evolve(request, op="linear", shape=shape, parts=(shape[0],))
            seed, factor = 3 * index + part, _FACTORS[index % len(_FACTORS)]
            if request.scheme == "nvfp4":
                weights.append(random_weight(asked, shape[0], seed=seed, scale_factor=factor))
            else:
                weights.append(random_fp8(asked, shape[0], seed=seed, scale_factor=factor))
    return weights


def _reference(
    weights: list[Weight],
    experts: int,
    x: Tensor,
    chosen: Tensor,
    router: Tensor,
    gate: Tensor,
    shared: Tensor | None,
    residual: Tensor,
) -> Tensor:
    """[M, K] float32, nothing rounded but the activations; one expert's weights wide at a time."""
    out = residual.float()
    weight = gate.float().sigmoid()
    for index in range(len(weights) // 3):
        first, up, down = (part.dequantize(torch.float32) for part in weights[3 * index : 3 * index + 3])
        act = swiglu(x.float() @ first.T, x.float() @ up.T).to(x.dtype)
        of_tokens = (router * (chosen == index)).sum(-1, keepdim=True) if index < experts else weight
        out = out + of_tokens * (act.float() @ down.T)
    return out if shared is None else out + weight * shared.float()


def _format(request: KernelRequest) -> PackedFormat:
    return FORMAT if request.scheme == "nvfp4" else SCALES_OF[request.scheme].format


def _shape(request: KernelRequest) -> tuple[int, int]:
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    return request.shape
