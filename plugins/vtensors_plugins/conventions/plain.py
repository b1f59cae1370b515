"""Unquantized tensors: BF16, F16 and F32 weights of any rank, stacked experts, bare parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from vtensors.claiming import claims_of
from vtensors.configs import ConfigFiles
from vtensors.forms import ANY_SHAPE, FLOAT_DTYPES, Form, FormMatch, TensorForm, match_form
from vtensors.hookspecs import hookimpl
from vtensors.records import (
    Claim,
    ClaimRequest,
    Convention,
    Declaration,
    PluginInfo,
    Refusal,
    TensorGroup,
    TensorSource,
)
from vtensors.records import Weight as WeightProtocol
from vtensors_plugins.conventions.parts import BIAS, STACKED_BIAS, read_roles
from vtensors_plugins.conventions.plain_writing import WRITER

if TYPE_CHECKING:
    from vtensors.tensors import TensorInfo

SOURCE = "safetensors 0.8 dtypes; transformers 5.24 state dicts"
SCHEMES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
# Names that only quantized modules have; a plain weight beside one of them is not plain.
QUANTISED_SUFFIX = re.compile(
    r"(^|_)(scale|scales|scale_inv|scale_2|scale_ub|zero_point|zeros|packed|qweight|qzeros|g_idx|absmax"
    r"|quant_map|blocks|svdquant_lora_[ab]|weight_shape)$|quant_state|nested_"
)


def _form(dtype: str, scheme: str, shape: str) -> Form:
    weight = TensorForm(suffix="weight", dtypes=(dtype,), shapes=(shape,), role="codes")
    bias = STACKED_BIAS if shape.startswith("[E") else BIAS
    return Form(
        scheme=scheme,
        algorithms=("unquantized",),
        formula="weight",
        source=SOURCE,
        tensors=(weight,) if shape == ANY_SHAPE else (weight, bias),
    )


FORMS: tuple[Form, ...] = tuple(
    _form(dtype, scheme, shape)
    for shape in ("[N, K]", "[E, N, K]", ANY_SHAPE)
    for dtype, scheme in SCHEMES.items()
)
_BY_DTYPE = {
    dtype: {form.tensors[0].shapes[0]: form for form in FORMS if form.scheme == scheme}
    for dtype, scheme in SCHEMES.items()
}


def declare(configs: ConfigFiles) -> Declaration | None:
    """Says nothing of any module: unquantized weights need no declaration."""
    return Declaration(convention="plain", scheme_of=lambda module: None, summary="")


def claim(request: ClaimRequest) -> list[Claim | Refusal]:
    """Float tensors without companions; a bare parameter is claimed under its full tensor name."""
    answers: list[Claim | Refusal] = []
    for group in request.groups:
        answers.extend(_claim_group(group))
    return answers


@lru_cache(maxsize=4096)
def _is_companion(suffix: str) -> bool:
    return QUANTISED_SUFFIX.search(suffix) is not None


def _claim_group(group: TensorGroup) -> Iterator[Claim | Refusal]:
    tensors = group.tensors
    if "weight" in tensors and tensors["weight"].dtype in SCHEMES and len(tensors) == 1:
        yield from _claim_weight(group)
        return
    companions = [suffix for suffix in tensors if _is_companion(suffix)]
    others = {suffix: info.dtype for suffix, info in tensors.items() if info.dtype not in SCHEMES}
    if companions:
        yield Refusal(module=group.module, reason=_quantized_reason(group, companions))
        return
    if others:
        yield Refusal(module=group.module, reason=_dtype_reason(others))
        return
    if "weight" in tensors:
        yield from _claim_weight(group)
    for suffix, info in tensors.items():
        if suffix not in ("weight", "bias") or "weight" not in tensors:
            yield _bare(info)


def _claim_weight(group: TensorGroup) -> Iterator[Claim | Refusal]:
    weight = group.tensors["weight"]
    forms = _BY_DTYPE[weight.dtype]
    own = {s: i for s, i in group.tensors.items() if s in ("weight", "bias")}
    if len(weight.shape) == 3 and group.module.rpartition(".")[0].endswith(".experts"):
        stacked = match_form(forms["[E, N, K]"], own)
        if isinstance(stacked, FormMatch):
            yield from claims_of("plain", group.module, stacked, None)
        else:
            yield Refusal(module=group.module, reason=stacked)
        return
    form = forms["[N, K]"] if len(weight.shape) == 2 else forms[ANY_SHAPE]
    roles = {"codes": weight}
    if "bias" in own:
        bias = own["bias"]
        if not weight.shape or bias.shape != weight.shape[:1]:
            yield Refusal(
                module=group.module,
                reason=f"wants 'bias' of shape [{weight.shape[0] if weight.shape else ''}], "
                f"found {bias.describe()}",
            )
            return
        roles["bias"] = bias
    yield Claim(
        module=group.module,
        convention="plain",
        scheme=form.scheme,
        shape=weight.shape,
        roles=roles,
        form=form,
    )


def _bare(info: TensorInfo) -> Claim:
    form = _BY_DTYPE[info.dtype][ANY_SHAPE]
    return Claim(
        module=info.name,
        convention="plain",
        scheme=form.scheme,
        shape=info.shape,
        roles={"codes": info},
        form=form,
    )


def _quantized_reason(group: TensorGroup, companions: list[str]) -> str:
    weight = group.tensors.get("weight")
    if weight is None:
        return f"'{companions[0]}' without the weight that it belongs to"
    if weight.dtype.startswith("F8"):
        return (
            f"an FP8 weight is not plain; beside it: {', '.join(companions)} "
            "(known scale names: weight_scale, weight_scale_inv)"
        )
    return f"weight is {weight.dtype}, yet {', '.join(repr(name) for name in companions)} is beside it"


def _dtype_reason(others: dict[str, str]) -> str:
    suffix, dtype = next(iter(others.items()))
    if dtype.startswith("F8"):
        return f"'{suffix}' is {dtype} and no scale is beside it (known: weight_scale, weight_scale_inv)"
    return f"'{suffix}' is {dtype}, wants {', '.join(FLOAT_DTYPES)}"


def read(claim: Claim, source: TensorSource) -> WeightProtocol:
    """A PlainWeight over a zero-copy view; one expert's rows where the tensor is stacked."""
    from vtensors_formats import PlainWeight

    roles = read_roles(claim, source)
    return PlainWeight(tensor=roles["codes"], bias=roles.get("bias"))


CONVENTION = Convention(
    name="plain",
    summary="Unquantized BF16, F16 and F32 tensors, experts per expert or stacked.",
    forms=FORMS,
    declare=declare,
    read=read,
    claim=claim,
    write=WRITER,
)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """This plugin."""
    return PluginInfo(name="plain", summary=CONVENTION.summary)


@hookimpl
def vtensors_conventions() -> list[Convention]:
    """The `plain` convention."""
    return [CONVENTION]
