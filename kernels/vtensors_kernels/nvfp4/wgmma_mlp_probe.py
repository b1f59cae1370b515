"""The self-test of `WgmmaMlp`: bit for bit its two linears one after the other."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_kernels.fp8.packed import SCALES_OF
from vtensors_kernels.fp8.probes import random_fp8
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.nvfp4 import wgmma_form, wgmma_segments_form
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear, random_weight
from vtensors_kernels.nvfp4.wgmma_form import WgmmaForm
from vtensors_kernels.nvfp4.wgmma_mlp import Asked, Form, MlpForms, WgmmaMlp, choose_forms
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments
from vtensors_kernels.packed_matrix import PackedMatrix

_EPS = 1e-6


def probe_wgmma_mlp(gate_up: KernelRequest, down: KernelRequest, tokens: tuple[int, int]) -> None:
    """Launch what the two would be given at each width of products, of fewer features I, with poisoned memory.

    gate_up, down: of `norm_linear_swiglu` and `linear_add`. Raises VtensorsError where bits differ.
    """
    if gate_up.shape is None or down.shape is None:
        raise RequestError("a self-test needs the weights' shapes", seen=f"{gate_up} {down}")
    dtype: torch.dtype = getattr(torch, gate_up.dtype)
    device, columns = torch.device(gate_up.device), gate_up.shape[1]
    count = torch.cuda.get_device_properties(device).multi_processor_count
    gain = torch.linspace(0.5, 1.5, columns, device=device)
    asked = [
        Asked(shape=shape, block_bytes=_random(request, (32, 32)).format.block_bytes)
        for request, shape in ((gate_up, gate_up.shape), (down, down.shape))
    ]
    widths, most = (*wgmma_segments_form.WIDTHS, *wgmma_form.WIDTHS), tokens[1]
    if gate_up.scheme in SCALES_OF or down.scheme in SCALES_OF:
        most = min(most, wgmma_segments_form.MAX_TOKENS)  # more tokens have the same launches twice
    for m in sorted({max(min(tokens[0], most), min(width, most)) for width in widths}):
        forms = choose_forms(asked[0], asked[1], m, count)
        # More than a block's rows, with a tail of a stage behind most of them.
        rows = min(gate_up.shape[0], forms.gate_up.warps * forms.gate_up.cluster * 16 + 64)
        first, second = _random(gate_up, (rows, columns)), _random(down, (columns, rows // 2))
        both = WgmmaMlp(first, second, dtype, tokens=(m, m), forms=forms)
        both.workspace.poison()
        h = torch.linspace(-3, 3, m * columns, device=device).cos().reshape(m, -1).to(dtype)
        wanted = _apart(first, second, forms, h, gain)
        for _ in range(2):
            ours = both(h, gain, _EPS)
            if not torch.equal(ours, wanted) or wanted.isnan().any():
                raise VtensorsError(
                    "the self-test failed: other bits than its two linears",
                    seen=f"{int((ours != wanted).sum())} of {wanted.numel()} differ at M = {m}",
                )


def _apart(first: PackedMatrix, second: PackedMatrix, forms: MlpForms, h: Tensor, gain: Tensor) -> Tensor:
    x = _linear(first, forms.gate_up, h, "linear_swiglu").normed(h, gain, _EPS)
    return _linear(second, forms.down, h, "linear_add")(x, h)


def _linear(packed: PackedMatrix, form: Form, h: Tensor, op: str) -> WgmmaSegments | WgmmaLinear:
    if isinstance(form, WgmmaForm) and isinstance(packed, PackedNVFP4):
        return WgmmaLinear(packed, h.dtype, op, tokens=(h.shape[0], h.shape[0]), forms=(form,))
    if isinstance(form, WgmmaForm):
        raise RequestError("no such product of this format", seen=type(packed).__name__)
    return WgmmaSegments(packed, h.dtype, op, forms=(form,))


def _random(request: KernelRequest, shape: tuple[int, int]) -> PackedMatrix:
    """Packed, on the request's device."""
    (n, k), paired = shape, request.op.endswith("swiglu")
    parts = 2 if paired else 1
    if request.scheme not in SCALES_OF:
        device = torch.device(request.device)
        return pack([random_weight(n // parts, k, device, seed) for seed in range(parts)], paired=paired)
    asked = attrs.evolve(request, shape=shape, parts=())
    return pack_fp8([random_fp8(asked, n // parts, seed=seed) for seed in range(parts)], paired=paired)
