"""transformers' fine-grained FP8 (DeepSeek style): `weight_scale_inv` multiplies despite its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from vtensors.claiming import claim_by_forms
from vtensors.configs import ConfigFiles, QuantizationBlock, string_list
from vtensors.errors import DeclarationError
from vtensors.forms import FLOAT_DTYPES, UNUSED_ROLE, Form, TensorForm
from vtensors.hookspecs import hookimpl
from vtensors.matching import Matcher, fused_spellings, suffix_entry
from vtensors.patterns import MatchBudget
from vtensors.records import (
    Claim,
    ClaimRequest,
    Convention,
    Declaration,
    DeclaredScheme,
    PluginInfo,
    Refusal,
    TensorSource,
)
from vtensors.records import Weight as WeightProtocol
from vtensors_plugins.conventions.hf_fp8_experts import (
    claim_experts,
    has_own_weight,
    read_expert_roles,
    scale_of_rows,
)
from vtensors_plugins.conventions.hf_fp8_left_over import claim_left_over
from vtensors_plugins.conventions.hf_fp8_writing import WRITER
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

SOURCE = "transformers 5.24 quantizers/quantizer_finegrained_fp8.py, integrations/finegrained_fp8.py"
METHODS = ("fp8", "mxfp8")
# `weight_block_size: null`: a matrix that one block would hold is per tensor like the others.
WITHOUT_BLOCKS = "fp8 without blocks"
_EXPONENTS = ("F8_E8M0", "U8")
# `mxfp8` is MXFP8 whether or not its block of [1, 32] is spelled out; under `fp8` the same block is one of many.
_ALGORITHMS = {
    "fp8-block": ("fp8",),
    "fp8-tensor": ("fp8", WITHOUT_BLOCKS),
    "fp8-row": ("fp8", WITHOUT_BLOCKS),
    "mxfp8": METHODS,
}
_GRID_3D = ("[E, ceil(N/BN), ceil(K/BK)]",)
# transformers keeps a matrix of one block in two dimensions; one scale for gate and up, or one for each.
_ONE = (*PER_TENSOR, "[1, 1]")
_ONE_3D = ("[E, 1, 1]", "[E, 2, 1]")


def _form(
    scheme: str, suffix: str, scales: tuple[str, ...], dtypes: tuple[str, ...], codes: str = "[N, K]"
) -> Form:
    exponent = dtypes[0] in _EXPONENTS
    stacked = codes.startswith("[E")
    scale = TensorForm(suffix=suffix, dtypes=dtypes, shapes=scales, role="scale", sense="multiplies")
    inputs = tuple(
        TensorForm(
            suffix=name,
            dtypes=("F32", "BF16"),
            shapes=(*PER_TENSOR, "[E]") if stacked else PER_TENSOR,
            role="input_scale",
            sense="multiplies",
            required=False,
        )
        for name in ("activation_scale", "input_scale")
    )
    return Form(
        scheme=scheme,
        algorithms=(*_ALGORITHMS[scheme], *(METHODS if stacked else ())),
        formula=f"e4m3(weight) * {f'2^({suffix} - 127)' if exponent else suffix}",
        source=SOURCE,
        tensors=(
            TensorForm(suffix="weight", dtypes=("F8_E4M3",), shapes=(codes,), role="codes"),
            scale,
            *inputs,
            STACKED_BIAS if stacked else BIAS,
        ),
    )


FORMS: tuple[Form, ...] = (
    _form("fp8-block", "weight_scale_inv", PER_BLOCK, FLOAT_DTYPES),
    _form("fp8-tensor", "weight_scale_inv", _ONE, FLOAT_DTYPES),
    _form("fp8-row", "weight_scale_inv", PER_ROW, FLOAT_DTYPES),
    _form("fp8-block", "weight_scale_inv", PER_BLOCK, _EXPONENTS),
    _form("fp8-tensor", "weight_scale_inv", _ONE, _EXPONENTS),
    _form("mxfp8", "weight_scale_inv", ("[N, K/32]",), _EXPONENTS),
    _form("fp8-block", "scale", PER_BLOCK, ("F8_E8M0",)),
    _form("fp8-tensor", "weight_scale", PER_TENSOR, FLOAT_DTYPES),
    _form("fp8-row", "weight_scale", PER_ROW, FLOAT_DTYPES),
    _form("fp8-block", "weight_scale", PER_BLOCK, FLOAT_DTYPES),
    _form("fp8-block", "weight_scale_inv", _GRID_3D, FLOAT_DTYPES, "[E, N, K]"),
    _form("fp8-block", "weight_scale_inv", _GRID_3D, _EXPONENTS, "[E, N, K]"),
    _form("fp8-tensor", "weight_scale_inv", _ONE_3D, FLOAT_DTYPES, "[E, N, K]"),
    _form("fp8-tensor", "weight_scale_inv", _ONE_3D, _EXPONENTS, "[E, N, K]"),
)


def declare(configs: ConfigFiles) -> Declaration | None:
    """The declaration of `quant_method: fp8`, or None.

    Where the same block also lists ModelOpt's quantized_layers, those modules are left to that convention.
    Errors: an unknown activation_scheme, fmt or block size.
    """
    block = next((b for b in configs.blocks() if b.quant_method in METHODS), None)
    if block is None:
        return None
    values, where = block.values, block.where
    layers = values.get("quantized_layers")
    if isinstance(values.get("quant_algo"), str) and not isinstance(layers, Mapping):
        return None
    _check(values, where)
    size = _block_size(block)
    skipped = [
        *string_list(values, "modules_to_not_convert", where),
        *string_list(values, "ignored_layers", where),
    ]
    if isinstance(layers, Mapping):
        skipped = []
    budget = MatchBudget()
    matcher = Matcher(entries=tuple(suffix_entry(text, where, budget) for text in skipped), suffixes=True)
    static = values.get("activation_scheme") == "static"
    scheme = DeclaredScheme(
        weight="mxfp8" if block.quant_method == "mxfp8" else "fp8",
        algorithm=WITHOUT_BLOCKS if _has_no_blocks(block) else str(block.quant_method),
        activations="fp8-static" if static else "fp8-dynamic",
        where=where,
        block=size,
    )
    resolver = _Resolver(
        scheme=scheme,
        plain=DeclaredScheme(
            weight="unquantized",
            algorithm="unquantized",
            activations="16bit",
            where=f"{where}: modules_to_not_convert",
            explicit=True,
        ),
        skipped=matcher,
        others=frozenset(layers) if isinstance(layers, Mapping) else frozenset(),
    )
    grid = f" {size[0]}x{size[1]}" if size else ""
    return Declaration(
        convention="hf-fp8",
        scheme_of=resolver.scheme_of,
        summary=f"{block.quant_method}{grid}, activations {scheme.activations}",
        matchers=(matcher,),
    )


def _check(values: Mapping[str, Any], where: str) -> None:
    for key, accepted in (
        ("activation_scheme", ("dynamic", "static", None)),
        ("fmt", ("e4m3", "float8_e4m3fn", None)),
        ("scale_fmt", ("float", "ue8m0", None)),
    ):
        if values.get(key) not in accepted:
            raise DeclarationError(
                f"{key} is not supported",
                file=where,
                seen=repr(values.get(key)),
                accepted=", ".join(repr(word) for word in accepted if word),
                fix="correct the configuration file, or use the one that belongs to the weights",
            )


def _has_no_blocks(block: QuantizationBlock) -> bool:
    null = "weight_block_size" in block.values and block.values["weight_block_size"] is None
    return null and block.quant_method == "fp8"


def _block_size(block: QuantizationBlock) -> tuple[int, int] | None:
    size = block.values.get("weight_block_size")
    if size is None:
        return None
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    raise DeclarationError(
        "weight_block_size is not two sizes",
        file=block.where,
        seen=repr(size),
        accepted="[rows, columns] or null",
        fix="correct the configuration file, or use the one that belongs to the weights",
    )


@attrs.frozen(kw_only=True)
class _Resolver:
    scheme: DeclaredScheme
    plain: DeclaredScheme
    skipped: Matcher
    others: frozenset[str]

    def scheme_of(self, module: str) -> DeclaredScheme | None:
        """FP8 unless listed as not converted; None for what another convention's table lists."""
        if self.others and any(name in self.others for name in fused_spellings(module)):
            return None
        return self.plain if self.skipped.find(module) is not None else self.scheme


def read(claim: Claim, source: TensorSource) -> WeightProtocol:
    """The claim's FP8Weight or MXFP8Weight; UE8M0 grids stay as stored, one such scale becomes its float32."""
    from vtensors_formats import FP8Weight, MXFP8Weight, PlainWeight, e8m0

    if UNUSED_ROLE in claim.roles:
        plain = read_roles(claim, source)
        return PlainWeight(tensor=plain["codes"], bias=plain.get("bias"))
    roles = read_expert_roles(claim, source) if has_own_weight(claim) else read_roles(claim, source)
    scale, bias, activation = roles["scale"], roles.get("bias"), _activation(claim, roles)
    if claim.scheme == "mxfp8":
        return MXFP8Weight(codes=roles["codes"], scale=scale, bias=bias, activation=activation)
    block, row_offset = None, 0
    if claim.scheme == "fp8-tensor":
        scale = scale_of_rows(scale, claim, None)[0].reshape(())
        scale = e8m0.decode(scale) if scale.dtype in e8m0.DTYPES else scale
    elif claim.scheme == "fp8-row":
        scale = column(scale)
    else:
        block = claim.declared.block if claim.declared and claim.declared.block else (128, 128)
        scale, row_offset = scale_of_rows(scale, claim, block)
    return FP8Weight(
        codes=roles["codes"],
        scale=scale,
        block=block,
        row_offset=row_offset,
        bias=bias,
        activation=activation,
    )


def claim(request: ClaimRequest) -> list[Claim | Refusal]:
    """By forms, the experts whose scales lie in one tensor, and what the writer left unquantized."""
    return [
        *claim_by_forms(CONVENTION, request),
        *claim_experts(CONVENTION.name, request),
        *claim_left_over(CONVENTION.name, request),
    ]


def _activation(claim: Claim, roles: dict[str, Tensor]) -> ActivationQuantizer:
    from vtensors_formats import FP8GroupActivation, FP8StaticActivation, FP8TokenActivation, MXFP8Activation

    if claim.scheme == "mxfp8":
        return MXFP8Activation()
    input_scale = static_scale(claim, roles)
    if input_scale is not None:
        return FP8StaticActivation(scale=input_scale.reshape(()))
    if claim.scheme == "fp8-block":
        block = claim.declared.block if claim.declared else None
        return FP8GroupActivation(group=block[1] if block else 128)
    return FP8TokenActivation()


CONVENTION = Convention(
    name="hf-fp8",
    summary="transformers fine-grained FP8: weight_scale_inv per tensor, row or block, float or UE8M0; "
    "experts stacked, per expert, or per expert with the scales of all in one tensor.",
    forms=FORMS,
    declare=declare,
    read=read,
    claim=claim,
    quant_methods=METHODS,
    write=WRITER,
)


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """This plugin."""
    return PluginInfo(name="hf-fp8", summary=CONVENTION.summary)


@hookimpl
def vtensors_conventions() -> list[Convention]:
    """The `hf-fp8` convention."""
    return [CONVENTION]
