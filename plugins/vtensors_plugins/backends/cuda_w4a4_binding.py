"""How the kernels with NVFP4 activations are packed for, bound and tested; imported when one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4.block_scaled import BlockScaledLinear
from vtensors_kernels.nvfp4.block_scaled_packing import pack_block_scaled
from vtensors_kernels.nvfp4.emulated_w4a4 import EmulatedW4A4, pack_emulated, widening_quantizer
from vtensors_kernels.nvfp4.w4a4_cublas import CublasW4A4, pack_tiled
from vtensors_kernels.nvfp4.w4a4_probes import probe_w4a4
from vtensors_kernels.nvfp4.w4a4_requests import sixteen_bits
from vtensors_plugins.backends import cuda_nvfp4_binding
from vtensors_plugins.backends.cuda_calls import over_rows

Call = Callable[..., Tensor]

# Kernel -> its prepared weight from the stored ones.
PACKERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"block_scaled": pack_block_scaled, "cublas": pack_tiled, "emulated": pack_emulated}
)
_LAUNCHERS: Mapping[str, Callable[..., Call]] = MappingProxyType(
    {"block_scaled": BlockScaledLinear, "cublas": CublasW4A4}
)
_OUTPUTS: Mapping[str, str] = MappingProxyType({"block_scaled": "fragments", "cublas": "tiled"})


def bind_w4a4(kernel: str, prepared: Any, request: KernelRequest) -> Call:
    """The op's call: x quantized by one launch (a norm in front included), multiplied by the kernel.

    kernel: `block_scaled`, `cublas`, or that of the 16-bit kernel that the emulation uses. Errors: the launchers'.
    """
    dtype: torch.dtype = getattr(torch, request.dtype)
    norm, op = request.op.startswith("norm_"), request.op.removeprefix("norm_")
    if kernel not in _LAUNCHERS:
        return _emulated(kernel, prepared, request, dtype)
    epilogue = "linear" if op == "linears" else op
    linear = _LAUNCHERS[kernel](prepared, dtype, epilogue, norm=norm)
    if norm:
        return over_rows(lambda x, gain, eps: linear(x, None, gain, eps))
    return over_rows(linear)


def probe_w4a4_kernel(kernel: str, request: KernelRequest) -> None:
    """Raises VtensorsError unless the quantizer and the op agree with the reference.

    An emulated kernel's own self-test, at 16-bit activations, comes first.
    """
    native = kernel in _LAUNCHERS
    if not native:
        cuda_nvfp4_binding.PROBES[kernel](sixteen_bits(request))
    pack = PACKERS[kernel if native else "emulated"]

    def bind(weights: Sequence[NVFP4Weight], asked: KernelRequest) -> Call:
        return bind_w4a4(kernel, pack(weights, paired=asked.op.endswith("swiglu")), asked)

    same_rows = kernel in ("block_scaled", "stream", "wgmma_segments")
    probe_w4a4(request, bind, output=_OUTPUTS.get(kernel, "widened"), same_rows=same_rows)


def _emulated(kernel: str, prepared: EmulatedW4A4, request: KernelRequest, dtype: torch.dtype) -> Call:
    linear = cuda_nvfp4_binding.BINDERS[kernel](prepared.packed, sixteen_bits(request))
    norm = request.op.startswith("norm_")
    quantizer = widening_quantizer(prepared, dtype, norm=norm)
    if norm:
        return over_rows(lambda x, gain, eps: linear(quantizer(x, gain, eps)[0]))
    return over_rows(lambda x, *rest: linear(quantizer(x)[0], *rest))
