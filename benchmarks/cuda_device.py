"""What a benchmark needs before it starts: a CUDA device, and what kernels for it are compiled with."""

from __future__ import annotations

import sys

import torch

from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.nvrtc import find_toolkit


def require_cuda(target: str | None = None) -> None:
    """Exit with status 2 and one line where something is missing. target: the only one that will do, as `sm_90a`."""
    if missing := missing_for(target):
        print(missing, file=sys.stderr)
        raise SystemExit(2)


def missing_for(target: str | None = None) -> str | None:
    """What is missing, or None: a device that torch sees, of that target where one is given, and NVRTC."""
    wanted = "a CUDA device" if target is None else f"a CUDA device of {target}"
    if not torch.cuda.is_available():
        return f"needs {wanted} and a torch that sees it; torch {torch.__version__} sees none"
    if target is not None and (seen := target_of(torch.cuda.get_device_capability())) != target:
        return f"needs {wanted}; torch's current device is {torch.cuda.get_device_name()} ({seen})"
    toolkit = find_toolkit()
    return f"needs a compiler for the device: {toolkit}" if isinstance(toolkit, str) else None
