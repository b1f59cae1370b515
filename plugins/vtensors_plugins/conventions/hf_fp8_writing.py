"""Writing transformers' fine-grained FP8: one scheme for all modules, `weight_scale_inv` that multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtensors.configs import CONFIG, HF_QUANT
from vtensors.errors import RequestError
from vtensors.records import ConventionWriter, OutputTensor, WeightToWrite, WrittenCheckpoint
from vtensors_plugins.conventions.common_writing import (
    as_stored,
    grid,
    optional_bias,
    refuse,
    refuse_roles,
    widened,
)

_NAME = "hf-fp8"


def spell(weight: WeightToWrite) -> tuple[OutputTensor, ...]:
    """`weight`, `weight_scale_inv`, `activation_scale` and `bias` of one module.

    Raises RequestError for weight-only modules, which this convention cannot declare.
    """
    refuse_roles(weight, _NAME, {"pre_scale": "pre_quant_scale"})
    if weight.activations not in ("fp8-static", "fp8-dynamic"):
        raise refuse(weight, "16-bit activations", _NAME, "it declares FP8 activations for every module")
    shape = grid(weight) if weight.scheme == "fp8-block" else ()
    tensors = [
        as_stored(weight, "codes", "weight"),
        widened(weight, "scale", "weight_scale_inv", shape),
        *optional_bias(weight),
    ]
    if "input_scale" in weight.roles:
        if weight.activations != "fp8-static":
            raise refuse(weight, "input_scale", _NAME, "dynamic activations have none")
        tensors.append(widened(weight, "input_scale", "activation_scale", ()))
    return tuple(tensors)


def configure(written: WrittenCheckpoint) -> Mapping[str, Mapping[str, Any] | None]:
    """config.json with the one declaration. Raises RequestError where modules differ in scheme or block."""
    if not written.weights:
        return {CONFIG: written.config, HF_QUANT: None}
    first = written.weights[0]
    for other in written.weights:
        kind = (other.scheme, _block(other), _scheme(other))
        if kind != (first.scheme, _block(first), _scheme(first)):
            raise RequestError(
                f"{_NAME} has one scheme for all quantized modules",
                tensor=other.module,
                seen=f"{other.scheme} {other.activations}, and {first.scheme} {first.activations} of "
                f"'{first.module}'",
                fix=f"make them alike: --to {_NAME}:fp8-block --allow-requantize",
            )
    block = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "float",
        "activation_scheme": _scheme(first),
        "weight_block_size": list(_block(first) or ()) or None,
        "modules_to_not_convert": sorted(written.unquantized),
    }
    return {CONFIG: {**written.config, "quantization_config": block}, HF_QUANT: None}


def _block(weight: WeightToWrite) -> tuple[int, int] | None:
    return (weight.block or (128, 128)) if weight.scheme == "fp8-block" else None


def _scheme(weight: WeightToWrite) -> str:
    return "static" if weight.activations == "fp8-static" and "input_scale" in weight.roles else "dynamic"


WRITER = ConventionWriter(
    schemes=("fp8-block", "fp8-tensor"),
    spell=spell,
    configure=configure,
    activations={"fp8-block": "fp8-dynamic", "fp8-tensor": "fp8-dynamic"},
)
