"""NVIDIA ModelOpt: `weight_scale` and `weight_scale_2` multiply; declared by quant_algo or quantized_layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtensors.errors import ClaimError
from vtensors.hookspecs import hookimpl
from vtensors.records import Claim, Convention, PluginInfo, TensorSource
from vtensors.records import Weight as WeightProtocol
from vtensors_plugins.conventions.modelopt_declaration import declare
from vtensors_plugins.conventions.modelopt_forms import FORMS
from vtensors_plugins.conventions.modelopt_sources import METHODS
from vtensors_plugins.conventions.modelopt_writing import WRITER
from vtensors_plugins.conventions.parts import column, read_roles, static_scale

if TYPE_CHECKING:
    from torch import Tensor

    from vtensors_formats import ActivationQuantizer


def read(claim: Claim, source: TensorSource) -> WeightProtocol:
    """The claim's canonical Weight: NVFP4Weight, FP8Weight or MXFP8Weight; tensors are views of the source."""
    from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight

    roles = read_roles(claim, source)
    bias, pre_scale, activation = roles.get("bias"), roles.get("pre_scale"), _activation(claim, roles)
    if claim.scheme == "nvfp4":
        weight = NVFP4Weight(
            codes=roles["codes"],
            block_scale=roles["block_scale"],
            global_scale=roles["global_scale"],
            bias=bias,
            pre_scale=pre_scale,
            activation=activation,
        )
        _require_group(claim, weight.group)
        return weight
    if claim.scheme == "mxfp8":
        return MXFP8Weight(codes=roles["codes"], scale=roles["scale"], bias=bias, activation=activation)
    scale, block = roles["scale"], None
    if claim.scheme == "fp8-tensor":
        scale = scale.reshape(())
    elif claim.scheme == "fp8-row":
        scale = column(scale)
    else:
        block = claim.declared.block if claim.declared and claim.declared.block else (128, 128)
        scale = scale.reshape(scale.shape[0] if scale.ndim else 1, -1)
    return FP8Weight(codes=roles["codes"], scale=scale, block=block, bias=bias, activation=activation)


def _require_group(claim: Claim, found: int) -> None:
    declared = claim.declared.group_size if claim.declared and claim.declared.weight == "nvfp4" else None
    if declared and declared != found:
        info = claim.roles["block_scale"]
        raise ClaimError(
            "the block scales are for other groups than declared",
            file=info.file,
            tensor=info.name,
            seen=f"{info.describe()}: one for {found} elements of K",
            accepted=f"one for {declared} elements (group_size in {claim.declared.where if claim.declared else ''})",
            fix="correct group_size, or export the checkpoint again",
        )


def _activation(claim: Claim, roles: dict[str, Tensor]) -> ActivationQuantizer | None:
    """The quantizer for the layer's input, as the algorithm declares it; whether it runs is decided later.

    An NVFP4 module keeps its input_scale even where W4A16 is declared, so that W4A4 can be compared.
    """
    from vtensors_formats import (
        FP4Activation,
        FP8GroupActivation,
        FP8StaticActivation,
        FP8TokenActivation,
        MXFP8Activation,
    )

    algorithm = claim.declared.algorithm.lower() if claim.declared else ""
    input_scale = roles.get("input_scale")
    if claim.scheme == "nvfp4":
        if input_scale is None:
            return None
        if algorithm == "w4a8_nvfp4_fp8":
            return FP8StaticActivation(scale=input_scale)
        return FP4Activation(global_scale=input_scale)
    if claim.scheme == "mxfp8":
        return MXFP8Activation()
    input_scale = static_scale(claim, roles)
    if input_scale is not None:
        return FP8StaticActivation(scale=input_scale)
    return FP8GroupActivation(group=128) if claim.scheme == "fp8-block" else FP8TokenActivation()


CONVENTION = Convention(
    name="modelopt",
    summary="NVIDIA ModelOpt exports: NVFP4, W4A16_NVFP4, NVFP4_AWQ, W4A8_NVFP4_FP8, FP8 (tensor, channel, "
    "block), MXFP8 and MIXED_PRECISION.",
    forms=FORMS,
    declare=declare,
    read=read,
    quant_methods=METHODS,
    write=WRITER,
)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """This plugin."""
    return PluginInfo(name="modelopt", summary=CONVENTION.summary)


@hookimpl
def vtensors_conventions() -> list[Convention]:
    """The `modelopt` convention."""
    return [CONVENTION]
