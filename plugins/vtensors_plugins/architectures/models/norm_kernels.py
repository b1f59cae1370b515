"""Which norms of a model a kernel computes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.models.norm import BindNorm

_log = logging.getLogger("vtensors")
_HALVES = (torch.bfloat16, torch.float16)


def norm_binder(columns: int, options: BuildOptions) -> BindNorm | None:
    """Binds norms of rows of so many columns to the kernel of the device; None where the reference computes them.

    So it is on a CPU, for a plan, in other dtypes than bfloat16 and float16, where only reference kernels may be
    selected, without a compiler, and (said in the log) where the kernel fails its self-test.
    """
    device = torch.device(options.device)
    wanted = any("cpu" not in kernel.targets for kernel in options.kernels)
    if device.type != "cuda" or options.dry_run is not None or options.dtype not in _HALVES or not wanted:
        return None
    from vtensors_kernels.compiling.architectures import target_of
    from vtensors_kernels.compiling.nvrtc import compiler_for
    from vtensors_kernels.steps.rms_norm import NormForm, RMSNormKernel, why_no_norm_kernel

    serves = NormForm.serves(columns)
    if not serves or isinstance(compiler_for(target_of(torch.cuda.get_device_capability(device))), str):
        return None
    reason = why_no_norm_kernel(columns, options.dtype, device)
    if reason is not None:
        _log.warning("norms run without their kernel: %s", reason)
        return None

    def bind(gain: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
        return RMSNormKernel(gain, eps, options.dtype)

    return bind
