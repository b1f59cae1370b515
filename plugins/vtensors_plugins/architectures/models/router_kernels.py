"""What chooses the experts of a token: kernels of the device, or the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import DeviceError
from vtensors.kernel_binding import BoundKernel
from vtensors.kernel_plans import KernelPlan
from vtensors.self_test_runs import Runner, require_end, run_directly
from vtensors_kernels.layouts import PLAIN_ROWS
from vtensors_kernels.reference.router_topk import router_topk
from vtensors_plugins.architectures.build import BuildOptions, Parts
from vtensors_plugins.architectures.decoder_config import MoeConfig
from vtensors_plugins.architectures.groups import Merged, failure_of
from vtensors_plugins.architectures.models.norm_kernels import norm_binder
from vtensors_plugins.backends.cuda_plain_small import SUMS

Topk = Callable[[Tensor], tuple[Tensor, Tensor]]
"""logits [M, E] -> experts [M, k] int64 or int32, weights [M, k] float32."""


class Router(Protocol):
    """Norm, gates and choice of experts at once."""

    def serves(self, h: Tensor) -> bool:
        """Whether it takes these rows."""

    def __call__(self, h: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h [M, K] -> x = norm(h), experts [M, k], weights [M, k] float32, logits of the other gates [M, N - E]."""


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


def router_for(gates: BoundKernel | None, topk: Topk, config: MoeConfig, parts: Parts) -> Router | None:
    """The kernel that does in one launch what the norm's, the gates' and `topk` do, with the same bits.

    gates: the router's weight and those of other gates over the same x, bound last. None, so that there are three
    launches, where other kernels are to compute the gates, the norm or the choice, where the device has no such kernel
    for their shape (`norm_router` tells which it takes), for a plan, which notes it, and where the kernel fails its
    self-test, which the records of the gates tell.
    """
    options = parts.options
    merged = None if gates is None else _merged(gates.plan, config, options)
    if gates is None or merged is None:
        return None
    from vtensors_kernels.steps.norm_router import NormRouter
    from vtensors_kernels.steps.router import RouterTopk

    request = gates.plan.request
    if options.dry_run is None:
        norm = norm_binder(request.shape[1], options) if request.shape is not None else None
        if norm is None or not isinstance(topk, RouterTopk):
            return None
    if not parts.merges(merged, len(request.parts)):
        return None
    matrix = gates.prepared[PLAIN_ROWS]
    return NormRouter(matrix, config.experts, config.chosen, most_tokens=merged.tokens[1])


def _merged(gates: KernelPlan, config: MoeConfig, options: BuildOptions) -> Merged | None:
    """The kernel for the rows of which one after the other has the gates' sums in its order."""
    request = gates.request
    alike = [segment.tokens[1] for segment in takewhile(lambda one: one.kernel.sums == SUMS, gates.segments)]
    shape, capability = request.shape, request.capability
    if not alike or shape is None or capability is None:
        return None
    from vtensors_kernels.steps.norm_router import FUNCTION, MAX_TOKENS, serves_on

    if not serves_on(capability, shape, config.experts, config.chosen):
        return None
    return Merged(
        kernel=FUNCTION,
        tokens=(1, min(alike[-1] or MAX_TOKENS, MAX_TOKENS)),
        around="the norm before it and the choice of experts behind, in one launch",
        failure=lambda run: _why_no_router(
            shape, config.experts, config.chosen, options.dtype, torch.device(request.device), run
        ),
        again=lambda plans: _merged(plans[0], config, options),
    )


@lru_cache(maxsize=16)
def _why_no_router(
    shape: tuple[int, int], experts: int, chosen: int, dtype: torch.dtype, device: torch.device, run: Runner
) -> str | None:
    """None where the kernel passes its self-test. Raises DeviceError where that does not end."""
    from vtensors_kernels.steps.norm_router import probe_norm_router

    return failure_of(
        run, lambda: probe_norm_router(shape, experts, chosen, dtype, device), "the router kernel"
    )


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
