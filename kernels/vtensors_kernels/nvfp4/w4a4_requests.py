"""What the kernel behind a quantizer of NVFP4 activations is asked for; needs neither torch nor a GPU."""

from __future__ import annotations

import attrs

from vtensors.records import KernelRequest


def sixteen_bits(request: KernelRequest) -> KernelRequest:
    """The request with 16-bit activations, without norm and pre-scale: those are the quantizer's."""
    return attrs.evolve(
        request,
        op=request.op.removeprefix("norm_"),
        activations="16bit",
        traits=request.traits - {"pre_scale"},
    )
