"""What every CUDA kernel looks at in a request, and what the verdict of a self-test depends on."""

from __future__ import annotations

import hashlib

from vtensors.records import KernelRequest

HALVES = ("bfloat16", "float16")
# Columns of the rows that the norm kernel takes, at most.
_NORM_COLUMNS = 16384
# Of the self-tests: a verdict of less strict ones must not stand for them. Raise it with them.
_SELF_TESTS = 2


def refusal(request: KernelRequest, activations: tuple[str, ...] = ("16bit",)) -> str | None:
    """Why no kernel of those activations serves: precision, or no compiler for the device; None where one may.

    What this machine lacks does not count against a device that is only asked about.
    """
    if not request.assumed and request.capability is not None:
        from vtensors_kernels.compiling.architectures import target_of
        from vtensors_kernels.compiling.nvrtc import compiler_for

        compiler = compiler_for(target_of(request.capability))
        if isinstance(compiler, str):
            return compiler
    if request.activations not in activations:
        known = " or ".join("16-bit" if name == "16bit" else name for name in activations)
        return f"computes with {known} activations, not {request.activations}"
    if request.dtype not in HALVES:
        return f"computes in {' or '.join(HALVES)}, not {request.dtype}"
    return None


def norm_refusal(request: KernelRequest) -> str | None:
    """Why the kernel `rms_norm` does not compute the norm in front of the op; None where it does or there is none."""
    if request.op.startswith("norm_") and request.shape is not None and request.shape[1] > _NORM_COLUMNS:
        return f"a norm in front takes rows of up to {_NORM_COLUMNS} columns, not of {request.shape[1]}"
    return None


def fingerprint_line(request: KernelRequest, facts: str) -> str:
    """`NVRTC 13.0 sm_90a 3fa4b2c91d6e`: toolkit, target, and a hash of the facts."""
    from vtensors_kernels.compiling.architectures import target_of
    from vtensors_kernels.compiling.nvrtc import find_toolkit

    toolkit = find_toolkit()
    name = toolkit if isinstance(toolkit, str) else toolkit.name
    digest = hashlib.sha256(f"{_SELF_TESTS} {facts}".encode()).hexdigest()[:24]
    return f"{name} {target_of(request.capability or (8, 0))} {digest}"
