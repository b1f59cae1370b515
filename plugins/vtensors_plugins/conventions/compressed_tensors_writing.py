"""Writing compressed-tensors: global scales divide, KV scales belong to the attention module."""

from __future__ import annotations

from math import prod

from vtensors.errors import RequestError
from vtensors.records import ConventionWriter, Layout, OutputTensor, WeightToWrite
from vtensors_plugins.conventions.common_writing import (
    as_stored,
    exponent_bytes,
    float_scale,
    grid,
    optional_bias,
    refuse,
    refuse_roles,
    scalar,
)
from vtensors_plugins.conventions.compressed_tensors_groups import configure

_NAME = "compressed-tensors"


def spell(weight: WeightToWrite) -> tuple[OutputTensor, ...]:
    """The tensors of one module.

    Raises RequestError for pre_quant_scale and for FP8 activations beside NVFP4 weights.
    """
    refuse_roles(weight, _NAME, {"pre_scale": "pre_quant_scale"})
    codes = as_stored(weight, "codes", "weight")
    if weight.scheme == "nvfp4":
        if weight.activations not in ("fp4", "16bit"):
            raise refuse(weight, f"{weight.activations} activations", _NAME, "nvfp4 comes with fp4 or 16bit")
        if weight.roles["block_scale"].shape[-1] * 16 != weight.shape[1]:
            raise refuse(weight, "group_size", _NAME, "its NVFP4 has groups of 16")
        return (
            as_stored(weight, "codes", "weight_packed"),
            as_stored(weight, "block_scale", "weight_scale"),
            *scalar(
                weight,
                "weight_global_scale",
                (1,),
                multiplier="global_scale",
                divisor="global_divisor",
                divides=True,
            ),
            *scalar(
                weight,
                "input_global_scale",
                (1,),
                multiplier="input_scale",
                divisor="input_divisor",
                divides=True,
            ),
            *optional_bias(weight),
        )
    if weight.scheme == "mxfp8":
        return (codes, exponent_bytes(weight, "weight_scale"), *optional_bias(weight))
    n = weight.shape[0]
    shape = {"fp8-tensor": (1,), "fp8-row": (n, 1)}.get(weight.scheme) or grid(weight)
    inputs = (as_stored(weight, "input_scale", "input_scale", (1,)),) if "input_scale" in weight.roles else ()
    if inputs and weight.activations == "fp8-dynamic":
        raise refuse(weight, "input_scale", _NAME, "dynamic activations have none")
    return (codes, float_scale(weight, "weight_scale", shape), *inputs, *optional_bias(weight))


def kv_scale(attention: str, what: str, stored: Layout) -> tuple[str, Layout]:
    """`<attention>.k_scale`, [1] or per head as stored. Raises RequestError for shapes that are neither."""
    shape = (1,) if prod(stored.shape) == 1 else stored.shape
    if what not in ("k", "v", "q"):
        raise RequestError(
            f"{_NAME} has no '{what}_scale' of the KV cache",
            accepted="k, v and q",
            fix="choose another target for this checkpoint",
        )
    return f"{attention}.{what}_scale", Layout(dtype=stored.dtype, shape=shape)


_DYNAMIC = "fp8-dynamic"
_OWN = "compressed-tensors"

WRITER = ConventionWriter(
    schemes=("nvfp4", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8"),
    spell=spell,
    configure=configure,
    kv_scale=kv_scale,
    activations={"fp8-tensor": _DYNAMIC, "fp8-row": _DYNAMIC, "fp8-block": _DYNAMIC, "mxfp8": _DYNAMIC},
    arithmetic={"fp8-tensor": _OWN, "fp8-row": _OWN, "fp8-block": _OWN},
)
