"""What chooses the experts of a token: the kernel of the device, or the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import DeviceError
from vtensors.self_test_runs import Runner, require_end, run_directly
from vtensors_kernels.reference.router_topk import router_topk
from vtensors_plugins.architectures.build import BuildOptions

Topk = Callable[[Tensor], tuple[Tensor, Tensor]]
"""logits [M, E] -> experts [M, k] int64 or int32, weights [M, k] float32."""
_log = logging.getLogger("vtensors")
_HALVES = (torch.bfloat16, torch.float16)


def topk_for(experts: int, chosen: int, options: BuildOptions) -> Topk:
    """The largest `chosen` of so many experts.

    The reference on a CPU, for a plan, in other dtypes than bfloat16 and float16, where only reference kernels may be
    selected, without a compiler, and (said in the log) where the kernel fails its self-test.
    """
    device = torch.device(options.device)
    wanted = any("cpu" not in kernel.targets for kernel in options.kernels)
    if device.type == "cuda" and options.dry_run is None and options.dtype in _HALVES and wanted:
        from vtensors_kernels.compiling.architectures import target_of
        from vtensors_kernels.compiling.nvrtc import compiler_for

        if not isinstance(compiler_for(target_of(torch.cuda.get_device_capability(device))), str):
            run = run_directly if options.verdicts is None else options.verdicts.run
            kernel = _tested(experts, chosen, options.dtype, device, run)
            if not isinstance(kernel, str):
                return kernel
            _log.warning("the router runs without its kernel: %s", kernel)
    return lambda logits: router_topk(logits, chosen)


@lru_cache(maxsize=16)
def _tested(experts: int, chosen: int, dtype: torch.dtype, device: torch.device, run: Runner) -> Topk | str:
    """One kernel for all layers, or why there is none. Raises DeviceError where its self-test does not end."""
    from vtensors_kernels.steps.router import RouterTopk, probe_router

    try:
        require_end(run, lambda: probe_router(experts, chosen, dtype, device), "the router kernel")
        return RouterTopk(chosen, dtype, device)
    except DeviceError:
        raise
    except PLUGIN_FAILURES as problem:  # without CuPy or cuda-bindings there are errors of theirs
        return str(problem).partition("\n")[0]
