"""Matrices that transformers leaves unquantized, beside the scale that it made room for.

Saving quantizes a matrix only where its sides are multiples of the block (transformers 5.24
integrations/finegrained_fp8.py `_quantize_one`); the layer's scale was never filled and is saved all the same. Its
own forward pass takes such a weight as it is. Elsewhere a scale beside a plain weight has no such meaning.
"""

from __future__ import annotations

from collections.abc import Iterator

from vtensors.forms import FLOAT_DTYPES, UNUSED_ROLE, Form, FormMatch, TensorForm, match_form
from vtensors.records import Claim, ClaimRequest
from vtensors_plugins.conventions.parts import BIAS, PER_BLOCK

_SCHEMES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def _form(dtype: str, scheme: str) -> Form:
    return Form(
        scheme=scheme,
        algorithms=("unquantized",),
        formula="weight",
        source="transformers 5.24 integrations/finegrained_fp8.py FP8Linear",
        tensors=(
            TensorForm(suffix="weight", dtypes=(dtype,), shapes=("[N, K]",), role="codes"),
            TensorForm(
                suffix="weight_scale_inv",
                dtypes=(*FLOAT_DTYPES, "F8_E8M0"),
                shapes=PER_BLOCK,
                role=UNUSED_ROLE,
            ),
            BIAS,
        ),
    )


_FORMS = tuple(_form(dtype, scheme) for dtype, scheme in _SCHEMES.items())


def claim_left_over(convention: str, request: ClaimRequest) -> Iterator[Claim]:
    """A claim on each plain matrix whose sides are no multiples of the declared block, with its unfilled scale."""
    for group in request.groups if request.declaration is not None else ():
        weight = group.tensors.get("weight")
        if weight is None or weight.dtype not in _SCHEMES or "weight_scale_inv" not in group.tensors:
            continue
        declared = request.declaration.scheme_of(group.module) if request.declaration else None
        if declared is None or declared.weight != "fp8" or declared.block is None or len(weight.shape) != 2:
            continue
        if not any(side % size for side, size in zip(weight.shape, declared.block, strict=True)):
            continue
        form = next(form for form in _FORMS if form.scheme == _SCHEMES[weight.dtype])
        match = match_form(form, group.tensors, block=declared.block)
        if isinstance(match, FormMatch):
            yield Claim(
                module=group.module,
                convention=convention,
                scheme=form.scheme,
                shape=(weight.shape[0], weight.shape[1]),
                roles=match.roles,
                form=form,
                declared=declared,
            )
