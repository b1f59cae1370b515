"""compressed-tensors (llm-compressor): global scales divide; declared by config_groups with targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtensors.errors import WeightValueError
from vtensors.forms import FLOAT_DTYPES, Form, TensorForm
from vtensors.hookspecs import hookimpl
from vtensors.records import Claim, Convention, PluginInfo, TensorSource
from vtensors.records import Weight as WeightProtocol
from vtensors_plugins.conventions.compressed_tensors_declaration import declare
from vtensors_plugins.conventions.compressed_tensors_writing import WRITER
from vtensors_plugins.conventions.parts import (
    BIAS,
    PER_BLOCK,
    PER_ROW,
    PER_TENSOR,
    STACKED_BIAS,
    column,
    read_roles,
    static_scale,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vtensors_formats import ActivationQuantizer

SOURCE = "compressed-tensors 0.20 compressors/, quantization/lifecycle"
_INTEGERS = ("I8", "U8", "I32", "I64", "F8_E4M3", *FLOAT_DTYPES)


def _optional(
    suffix: str, role: str, dtypes: tuple[str, ...], shapes: tuple[str, ...], sense: str = ""
) -> TensorForm:
    return TensorForm(suffix=suffix, dtypes=dtypes, shapes=shapes, role=role, sense=sense, required=False)


# Legal extra tensors of symmetric schemes: zero points must be zero, weight_shape repeats the shape.
_EXTRAS = (
    _optional("weight_zero_point", "weight_zero_point", _INTEGERS, ("[*]",)),
    _optional("input_zero_point", "input_zero_point", _INTEGERS, ("[*]",)),
    _optional("weight_shape", "weight_shape", ("I64", "I32"), ("[2]",)),
)


def _nvfp4(codes: str, scales: str, scalars: tuple[str, ...], bias: TensorForm) -> Form:
    return Form(
        scheme="nvfp4",
        algorithms=("nvfp4-pack-quantized",),
        formula="e2m1(weight_packed) * (weight_scale / weight_global_scale)",
        source=SOURCE,
        tensors=(
            TensorForm(suffix="weight_packed", dtypes=("U8",), shapes=(codes,), role="codes"),
            TensorForm(
                suffix="weight_scale",
                dtypes=("F8_E4M3",),
                shapes=(scales,),
                role="block_scale",
                sense="multiplies",
            ),
            TensorForm(
                suffix="weight_global_scale",
                dtypes=("F32",),
                shapes=scalars,
                role="global_divisor",
                sense="divides",
            ),
            _optional("input_global_scale", "input_divisor", ("F32",), scalars, "divides"),
            bias,
            *_EXTRAS,
        ),
    )


def _fp8(
    scheme: str, codes: str, scales: tuple[str, ...], strategies: tuple[str, ...], bias: TensorForm
) -> Form:
    return Form(
        scheme=scheme,
        algorithms=tuple(
            f"{style}:{strategy}"
            for strategy in strategies
            for style in ("float-quantized", "naive-quantized")
        ),
        formula="e4m3(weight) * weight_scale",
        source=SOURCE,
        tensors=(
            TensorForm(suffix="weight", dtypes=("F8_E4M3",), shapes=(codes,), role="codes"),
            TensorForm(
                suffix="weight_scale", dtypes=FLOAT_DTYPES, shapes=scales, role="scale", sense="multiplies"
            ),
            _optional("input_scale", "input_scale", FLOAT_DTYPES, PER_TENSOR, "multiplies"),
            bias,
            *_EXTRAS,
        ),
    )


FORMS: tuple[Form, ...] = (
    _nvfp4("[N, K/2]", "[N, K/16]", PER_TENSOR, BIAS),
    _fp8("fp8-tensor", "[N, K]", PER_TENSOR, ("tensor",), BIAS),
    _fp8("fp8-row", "[N, K]", PER_ROW, ("channel",), BIAS),
    _fp8("fp8-block", "[N, K]", PER_BLOCK, ("block", "group"), BIAS),
    Form(
        scheme="mxfp8",
        algorithms=("mxfp8-quantized",),
        formula="e4m3(weight) * 2^(weight_scale - 127)",
        source=SOURCE,
        tensors=(
            TensorForm(suffix="weight", dtypes=("F8_E4M3",), shapes=("[N, K]",), role="codes"),
            TensorForm(
                suffix="weight_scale",
                dtypes=("U8", "F8_E8M0"),
                shapes=("[N, K/32]",),
                role="scale",
                sense="multiplies",
            ),
            BIAS,
            *_EXTRAS,
        ),
    ),
    _nvfp4("[E, N, K/2]", "[E, N, K/16]", ("[E]", "[E, 1]", *PER_TENSOR), STACKED_BIAS),
    _fp8("fp8-row", "[E, N, K]", ("[E, N, 1]",), ("channel",), STACKED_BIAS),
)


def read(claim: Claim, source: TensorSource) -> WeightProtocol:
    """The claim's canonical Weight: NVFP4Weight, FP8Weight or MXFP8Weight; tensors are views of the source."""
    from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight

    roles = read_roles(claim, source)
    _refuse_zero_points(claim, roles)
    bias, activation = roles.get("bias"), _activation(claim, roles)
    if claim.scheme == "nvfp4":
        return NVFP4Weight(
            codes=roles["codes"],
            block_scale=roles["block_scale"],
            global_divisor=roles["global_divisor"],
            bias=bias,
            activation=activation,
        )
    if claim.scheme == "mxfp8":
        return MXFP8Weight(codes=roles["codes"], scale=roles["scale"], bias=bias, activation=activation)
    scale, block = roles["scale"], None
    if claim.scheme == "fp8-tensor":
        scale = scale.reshape(())
    elif claim.scheme == "fp8-row":
        scale = column(scale)
    else:
        block = claim.declared.block if claim.declared and claim.declared.block else (128, 128)
    return FP8Weight(codes=roles["codes"], scale=scale, block=block, bias=bias, activation=activation)


def _activation(claim: Claim, roles: dict[str, Tensor]) -> ActivationQuantizer | None:
    from vtensors_formats import (
        FP4Activation,
        FP8GroupActivation,
        FP8StaticActivation,
        FP8TokenActivation,
        MXFP8Activation,
    )
    from vtensors_formats.e8m0 import ExponentRule

    declared = claim.declared.activations if claim.declared else "16bit"
    if claim.scheme == "nvfp4":
        divisor = roles.get("input_divisor")
        return None if divisor is None else FP4Activation(global_divisor=divisor)
    if claim.scheme == "mxfp8":
        return MXFP8Activation(rule=ExponentRule.FLOOR_ROUNDED) if declared != "16bit" else None
    input_scale = static_scale(claim, roles)
    if input_scale is not None:
        return FP8StaticActivation(scale=input_scale.reshape(()))
    if declared == "16bit":
        return None
    group = claim.declared.group_size if claim.declared else None
    return FP8GroupActivation(group=group) if group else FP8TokenActivation()


def _refuse_zero_points(claim: Claim, roles: dict[str, Tensor]) -> None:
    for role in ("weight_zero_point", "input_zero_point"):
        if role in roles and bool((roles[role].float() != 0).any()):
            raise WeightValueError(
                "a zero point that is not zero: asymmetric schemes are not supported",
                tensor=claim.roles[role].name,
                seen=f"first value {float(roles[role].float().flatten()[0])}",
                accepted="zero points of 0 (symmetric float schemes)",
                fix="use a checkpoint with symmetric scales",
            )


CONVENTION = Convention(
    name="compressed-tensors",
    summary="compressed-tensors exports (llm-compressor): nvfp4-pack-quantized, float-quantized, "
    "naive-quantized, mxfp8-quantized, mixed-precision.",
    forms=FORMS,
    declare=declare,
    read=read,
    quant_methods=("compressed-tensors",),
    write=WRITER,
)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """This plugin."""
    return PluginInfo(name="compressed-tensors", summary=CONVENTION.summary)


@hookimpl
def vtensors_conventions() -> list[Convention]:
    """The `compressed-tensors` convention."""
    return [CONVENTION]
