"""The self-test of `linear_nvfp4_wgmma` on what a request brings: rows of different sizes, each by its own norm."""

from __future__ import annotations

import torch

from vtensors.errors import RequestError
from vtensors.records import KernelRequest
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.row_probe import ROWS, RowCase
from vtensors_kernels.nvfp4.wgmma import MAX_TOKENS, WgmmaLinear
from vtensors_kernels.nvfp4.wgmma_form import WIDTHS, choose_form, width_of
from vtensors_kernels.probing import TOLERANCES

# silu is computed from rounded exponentials.
_ROUNDINGS = 2


def probe_wgmma_rows(request: KernelRequest) -> None:
    """Each form that request.tokens may need for its op, parts, traits and K, memory poisoned; raises where wrong.

    op: linear, linears, linear_add or linear_swiglu.
    """
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    least, most = request.tokens[0], request.tokens[1] or MAX_TOKENS
    count = torch.cuda.get_device_properties(torch.device(request.device)).multi_processor_count
    dtype: torch.dtype = getattr(torch, request.dtype)
    for width in (width for width in WIDTHS if width_of(least) <= width <= width_of(most)):
        form, m = choose_form(*request.shape, width, count), min(width, most)
        case = RowCase.make(request, rows=ROWS, tokens=m, factor=0.75)
        packed = pack(case.parts, paired=request.op == "linear_swiglu")
        linear = WgmmaLinear(packed, dtype, request.op, tokens=(m, m), forms=(form,))
        linear.workspace.poison()
        out = torch.full((m, linear.out_features), float("nan"), dtype=dtype, device=case.x.device)
        y = linear.run(case.x, out, case.residual)
        case.check(y, TOLERANCES[dtype] * _ROUNDINGS, f"{request.op} of {m} tokens, rows of different sizes")
