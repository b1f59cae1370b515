"""The runner of a model: the CUDA runner where it can serve it, else the reference runner, and said so."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Protocol

import torch

from vtensors.errors import DeviceError, VtensorsError
from vtensors_engine.fallbacks import report_slow_runner
from vtensors_engine.runner import NoRoomError, ReferenceRunner, Runner, SteppedModel

_log = logging.getLogger("vtensors")
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class SwitchedCheckpoint(Protocol):
    """A checkpoint knows the switches that its model was loaded under."""

    @property
    def switches(self) -> _Switches: ...


class _Switches(Protocol):
    def names(self, name: str) -> tuple[str, ...]: ...


class RunnableModel(SteppedModel, Protocol):
    """What a runner is chosen for."""

    @property
    def checkpoint(self) -> SwitchedCheckpoint: ...


def make_runner(model: RunnableModel, *, max_sequences: int, max_tokens: int | None = None) -> Runner:
    """The fastest runner that can serve the model.

    max_sequences: most at once. max_tokens: most in the caches at once, None = what fits; of CUDA alone.
    On a CUDA device the reference runner is a fallback: one line tells the reason. Raises RequestError instead
    where `VT_STRICT` has `fallbacks`, NoRoomError where the caches do not fit, which is no reason to be slow, and
    DeviceError where a self-test did not end: no runner gets anything from that device any more.
    """
    if model.device.type == "cpu":
        return ReferenceRunner(model, max_sequences=max_sequences)
    try:
        return _cuda_runner(model, max_sequences, max_tokens)
    except (NoRoomError, DeviceError):
        raise
    except torch.OutOfMemoryError as cause:
        raise NoRoomError(
            "the device has not enough free memory for the runner",
            seen=str(cause),
            fix="pass a smaller max_sequences or max_tokens",
        ) from cause
    except (VtensorsError, ImportError) as cause:
        strict = "fallbacks" in model.checkpoint.switches.names("VT_STRICT")
        report_slow_runner(str(model.device), cause, refuse=strict)
    return ReferenceRunner(model, max_sequences=max_sequences)


def _cuda_runner(model: RunnableModel, max_sequences: int, max_tokens: int | None) -> Runner:
    if model.dtype not in _SIXTEEN_BITS:
        raise VtensorsError(
            f"the CUDA runner computes in bfloat16 or float16, not {model.dtype}",
            accepted="bfloat16 or float16",
        )
    # Imported here: a model on a CPU needs nothing of CUDA.
    module = import_module("vtensors_engine.cuda.runner")
    runner: Runner = module.CudaRunner(model, max_sequences=max_sequences, max_tokens=max_tokens)
    if runner.capacity is not None and runner.capacity < max_sequences:
        _log.warning(
            "max_sequences is %d: %d run at a time, which is the most on CUDA, and the others wait",
            max_sequences,
            runner.capacity,
        )
    return runner
