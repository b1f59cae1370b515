"""Which weights may be computed by one fused kernel, and what a kernel is told of them.

Scales of different parts are never merged: a part keeps its own. Whatever changes x before the multiplication
must be the same for all parts, since they share one x.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.fp8 import FP8Weight
from vtensors_formats.nvfp4 import NVFP4Weight
from vtensors_formats.weight import Weight

_USUAL_BLOCK = (128, 128)


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One weight of a group. name: canonical. executed: activation mode that it runs with."""

    name: str
    weight: Weight
    executed: str


def why_apart(parts: Sequence[Part]) -> str | None:
    """Why the parts cannot be one fused weight, None where they can.

    Tensors without data (on the `meta` device) count as equal where their shapes are.
    """
    first = parts[0]
    for part in parts[1:]:
        a, b = first.weight, part.weight
        if a.scheme != b.scheme:
            return f"{first.name} is {a.scheme}, {part.name} is {b.scheme}"
        if first.executed != part.executed:
            return f"{first.name} runs with {first.executed} activations, {part.name} with {part.executed}"
        if a.shape[1:] != b.shape[1:]:
            return f"{first.name} has K = {list(a.shape[1:])}, {part.name} {list(b.shape[1:])}"
        if _block(a) != _block(b):
            return f"{first.name} has a scale per {_block(a)}, {part.name} per {_block(b)}"
        if not _same(a.pre_scale, b.pre_scale):
            return f"the activation pre-scales of {first.name} and {part.name} differ"
        if (a.bias is None) != (b.bias is None):
            return f"only one of {first.name} and {part.name} has a bias"
        if first.executed != "16bit" and not _same_quantizer(a.activation, b.activation):
            return f"the input scales of {first.name} and {part.name} differ"
    return None


def traits_of(parts: Sequence[Part], *, shared: bool) -> frozenset[str]:
    """The traits of a KernelRequest for the parts. shared: another op needs the stored weight too."""
    found = {"shared"} if shared else set()
    for part in parts:
        weight = part.weight
        if weight.bias is not None:
            found.add("bias")
        if weight.pre_scale is not None:
            found.add("pre_scale")
        if isinstance(weight, NVFP4Weight) and weight.group != 16:
            found.add(f"group{weight.group}")
        if isinstance(weight, FP8Weight) and weight.block is not None and weight.block != _USUAL_BLOCK:
            found.add(f"block{weight.block[0]}x{weight.block[1]}")
        scale = _matrix_scale(weight)
        # Parts with a scale each make one matrix whose scale changes from row to row.
        if scale is not None and (scale.ndim or len(parts) > 1):
            found.add("row_scale")
    return frozenset(found)


def why_experts_apart(parts: Sequence[Part]) -> str | None:
    """Why gate, up and down of the experts cannot be one mixture, None where they can: each keeps its own scales."""
    for index, part in enumerate(parts):
        like, weight = parts[index % 3], part.weight
        first = parts[0]
        if first.weight.scheme != weight.scheme:
            return f"{first.name} is {first.weight.scheme}, {part.name} is {weight.scheme}"
        if first.executed != part.executed:
            return f"{first.name} runs with {first.executed} activations, {part.name} with {part.executed}"
        if _block(first.weight) != _block(weight):
            return f"{first.name} has a scale per {_block(first.weight)}, {part.name} per {_block(weight)}"
        if like.weight.shape != weight.shape:
            return f"{like.name} is {list(like.weight.shape)}, {part.name} {list(weight.shape)}"
    return None


def expert_traits(parts: Sequence[Part], experts: int) -> frozenset[str]:
    """The traits of a KernelRequest for the weights of so many experts, or one more that every token has."""
    found = frozenset().union(*(traits_of([part], shared=False) for part in parts))
    return found | {"shared_expert"} if len(parts) > 3 * experts else found


def assumptions(parts: Sequence[Part]) -> tuple[str, ...]:
    """What `why_apart` took for equal because the parts have no data."""
    if len(parts) == 1:
        return ()
    found = []
    if any(part.weight.pre_scale is not None and part.weight.pre_scale.is_meta for part in parts):
        found.append("the activation pre-scales of the parts are equal")
    quantizers = [part.weight.activation for part in parts if part.executed != "16bit"]
    if any(scale.is_meta for quantizer in quantizers if quantizer for scale in _scales(quantizer).values()):
        found.append("the input scales of the parts are equal")
    return tuple(found)


def _block(weight: Weight) -> object:
    """Elements per scale, where that is a property of the weight and not of its scheme."""
    if isinstance(weight, NVFP4Weight):
        return weight.group
    return weight.block if isinstance(weight, FP8Weight) else None


def _matrix_scale(weight: Weight) -> Tensor | None:
    """The scale [] or [N, 1] of a whole matrix, None where the scheme has none."""
    if isinstance(weight, NVFP4Weight):
        return weight.global_scale if weight.global_scale is not None else weight.global_divisor
    return weight.scale if isinstance(weight, FP8Weight) and weight.scheme == "fp8-tensor" else None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.is_meta or b.is_meta or torch.equal(a, b)


def _same_quantizer(a: ActivationQuantizer | None, b: ActivationQuantizer | None) -> bool:
    if a is None or b is None:
        return a is b
    if type(a) is not type(b):
        return False
    ours, theirs = _scales(a), _scales(b)
    settings = [
        field.name for field in attrs.fields(type(a)) if field.name not in ours and field.name not in theirs
    ]
    return (
        ours.keys() == theirs.keys()
        and all(_same(ours[name], theirs[name]) for name in ours)
        and all(getattr(a, name) == getattr(b, name) for name in settings)
    )


def _scales(quantizer: ActivationQuantizer) -> dict[str, Tensor]:
    """The stored scales of a quantizer by field name."""
    return {
        field.name: value
        for field in attrs.fields(type(quantizer))
        if isinstance(value := getattr(quantizer, field.name), Tensor)
    }
