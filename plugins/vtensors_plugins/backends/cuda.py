"""The CUDA backend: exact widening to 16 bits before cuBLAS, for NVFP4 and FP8 weights at any M.

Each kernel is launched on a small weight of the same K and held against the reference before it is used. One
that fails to compile, to launch or to agree loses to the next, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vtensors.hookspecs import hookimpl
from vtensors.records import KernelRequest, KernelSpec, PluginInfo

if TYPE_CHECKING:
    from torch import Tensor

    from vtensors_formats.weight import Weight

# Behind kernels that read the weight as stored, before the reference.
_COST = 1e6
_HALVES = ("bfloat16", "float16")


def _refuse(request: KernelRequest) -> str | None:
    if request.activations != "16bit":
        return f"computes with 16-bit activations, not {request.activations}"
    if request.dtype not in _HALVES:
        return f"computes in {' or '.join(_HALVES)}, not {request.dtype}"
    return None


def _refuse_without_compiler(request: KernelRequest) -> str | None:
    from vtensors_kernels.compiling.nvrtc import find_toolkit

    toolkit = find_toolkit()
    return toolkit if isinstance(toolkit, str) else _refuse(request)


def _bind_nvfp4(weight: Weight, request: KernelRequest) -> Callable[[Tensor], Tensor]:
    from vtensors_kernels.widening import bind_nvfp4
    from vtensors_kernels.widening_probe import probe_nvfp4

    probe_nvfp4(weight.shape[1], request.dtype, request.device)
    return bind_nvfp4(weight)  # type: ignore[arg-type]


def _bind_fp8(weight: Weight, request: KernelRequest) -> Callable[[Tensor], Tensor]:
    from vtensors_kernels.widening import bind_fp8
    from vtensors_kernels.widening_probe import probe_fp8

    probe_fp8(weight.shape[1], weight.scheme, request.dtype, request.device)
    return bind_fp8(weight)  # type: ignore[arg-type]


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """Who this plugin is."""
    return PluginInfo(name="cuda", summary="Exact widening of NVFP4 and FP8 weights before cuBLAS.")


@hookimpl
def vtensors_kernels() -> list[KernelSpec]:
    """`linear_nvfp4_widening` and `linear_fp8_widening`."""
    return [
        KernelSpec(
            name="linear_nvfp4_widening",
            op="linear",
            schemes=("nvfp4",),
            targets=("cuda",),
            numerics="16-bit outputs, float32 sums",
            refuse=_refuse_without_compiler,
            bind=_bind_nvfp4,
            cost=_COST,
        ),
        KernelSpec(
            name="linear_fp8_widening",
            op="linear",
            schemes=("fp8-tensor", "fp8-row"),
            targets=("cuda",),
            numerics="16-bit outputs, float32 sums",
            refuse=_refuse_without_compiler,
            bind=_bind_fp8,
            cost=_COST,
        ),
    ]
