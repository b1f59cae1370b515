"""The CUDA backend: NVFP4 (`cuda_nvfp4`), FP8 and MXFP8 (`cuda_fp8`), quantized activations (`cuda_w4a4`, `cuda_w8a8`).

Each kernel is launched on a small weight of the same K and held against the reference before it is used. One
that fails to compile, to launch or to agree loses to the next, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vtensors.hookspecs import hookimpl
from vtensors.records import KernelRequest, KernelSpec, PluginInfo
from vtensors_plugins.backends.cuda_experts import experts_kernels
from vtensors_plugins.backends.cuda_fp8 import fp8_kernels
from vtensors_plugins.backends.cuda_nvfp4 import NUMERICS, nvfp4_kernels
from vtensors_plugins.backends.cuda_plain import embedding_kernels
from vtensors_plugins.backends.cuda_plain_small import plain_kernels
from vtensors_plugins.backends.cuda_requests import fingerprint_line, refusal
from vtensors_plugins.backends.cuda_w4a4 import w4a4_kernels
from vtensors_plugins.backends.cuda_w8a8 import w8a8_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from vtensors_formats import FP8Weight

# Behind kernels that read the weight as stored, before the reference.
_COST = 1e6


def _bind_fp8(weight: FP8Weight, _request: KernelRequest) -> Callable[[Tensor], Tensor]:
    from vtensors_kernels.widening import bind_fp8

    return bind_fp8(weight)


def _probe_fp8(request: KernelRequest) -> None:
    from vtensors.errors import RequestError
    from vtensors_kernels.widening_probe import probe_fp8

    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    probe_fp8(request.shape[1], request.scheme, request.dtype, request.device)


def _fingerprint_fp8(request: KernelRequest) -> str:
    from vtensors_kernels.compiling.functions import fingerprint

    return fingerprint_line(request, fingerprint("common/widen_fp8.cu", {}, request.capability or (8, 0)))


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """Who this plugin is."""
    return PluginInfo(name="cuda", summary="NVFP4, FP8 and MXFP8 kernels with 16-bit activations.")


@hookimpl
def vtensors_kernels() -> list[KernelSpec]:
    """The NVFP4 kernels, those of packed FP8, and `linear_fp8_widening`."""
    return [
        *nvfp4_kernels(),
        *fp8_kernels(),
        *embedding_kernels(),
        *plain_kernels(),
        *experts_kernels(),
        *w4a4_kernels(),
        *w8a8_kernels(),
        KernelSpec(
            name="linear_fp8_widening",
            op="linear",
            schemes=("fp8-tensor", "fp8-row"),
            targets=("cuda",),
            numerics=NUMERICS,
            refuse=refusal,
            bind=_bind_fp8,
            cost=_COST,
            probe=_probe_fp8,
            fingerprint=_fingerprint_fp8,
        ),
    ]
