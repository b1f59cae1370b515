"""What every CUDA kernel looks at in a request, and what the verdict of a self-test depends on."""

from __future__ import annotations

import hashlib

from vtensors.records import KernelRequest

HALVES = ("bfloat16", "float16")
# Of the self-tests: a verdict of less strict ones must not stand for them. Raise it with them.
_SELF_TESTS = 2


def refusal(request: KernelRequest) -> str | None:
    """Why no kernel with 16-bit operands serves: precision, or no compiler for the device; None where one may.

    What this machine lacks does not count against a device that is only asked about.
    """
    if not request.assumed and request.capability is not None:
        from vtensors_kernels.compiling.architectures import target_of
        from vtensors_kernels.compiling.nvrtc import compiler_for

        compiler = compiler_for(target_of(request.capability))
        if isinstance(compiler, str):
            return compiler
    if request.activations != "16bit":
        return f"computes with 16-bit activations, not {request.activations}"
    if request.dtype not in HALVES:
        return f"computes in {' or '.join(HALVES)}, not {request.dtype}"
    return None


def fingerprint_line(request: KernelRequest, facts: str) -> str:
    """`NVRTC 13.0 sm_90a 3fa4b2c91d6e`: toolkit, target, and a hash of the facts."""
    from vtensors_kernels.compiling.architectures import target_of
    from vtensors_kernels.compiling.nvrtc import find_toolkit

    toolkit = find_toolkit()
    name = toolkit if isinstance(toolkit, str) else toolkit.name
    digest = hashlib.sha256(f"{_SELF_TESTS} {facts}".encode()).hexdigest()[:24]
    return f"{name} {target_of(request.capability or (8, 0))} {digest}"
