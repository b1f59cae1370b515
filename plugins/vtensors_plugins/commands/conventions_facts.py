"""Tables for docs/conventions.md that are worked out by running the code that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vtensors.accounting import INPUT_SCALE_DYNAMIC, INPUT_SCALE_WEIGHT_ONLY, KV_SCALES, SYMMETRIC
from vtensors.activations import ActivationRequest, executed_activations
from vtensors.claiming import claims_of
from vtensors.forms import Form, FormMatch
from vtensors.grouping import group_tensors, kv_owner
from vtensors.records import Claim, DeclaredScheme
from vtensors.tensors import TensorInfo
from vtensors_plugins.architectures.prefixes import waivers_for
from vtensors_plugins.conventions.modelopt_forms import ALGORITHMS, UNSUPPORTED
from vtensors_plugins.conventions.plain import FORMS
from vtensors_plugins.conventions.unsupported import METHODS, SIGNATURES

# What may follow `mlp.experts.` where all experts lie in one tensor.
STACKED_NAMES = (
    "gate_up_proj",
    "gate_up_proj.weight",
    "gate_up_proj_weight",
    "gate_up_proj_packed",
    "gate_up_proj_scale",
    "gate_up_proj_scale_inv",
    "gate_up_proj_global_scale",
    "gate_up_proj_weight_scale",
    "gate_up_proj_weight_scale_2",
    "gate_up_proj_input_scale",
    "gate_up_proj_bias",
)
KV_SCALE_NAMES = (
    "self_attn.k_scale",
    "self_attn.v_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.qkv_proj.k_scale",
    "self_attn.attn.k_scale",
    "self_attn.k_proj.output_scale",
    "self_attn.v_proj.output_scale",
    "self_attn.kv_scale",
    "self_attn.q_scale",
    "self_attn.k_proj.k_bias",
    "self_attn.v_proj.v_bias",
)
_ROTARY_TABLE = "model.layers.0.self_attn.rotary_emb.inv_freq"
_REQUESTS = (
    ('None, `"16bit"`', ActivationRequest()),
    ('`"declared"`', ActivationRequest(argument="declared")),
    ('`"fp4"`', ActivationRequest(argument="fp4")),
    ("`VT_MODELOPT_W4A4=1`", ActivationRequest(modelopt_w4a4=True)),
    ("`VT_FP8_W8A8=1`", ActivationRequest(fp8_w8a8=True)),
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join((lines[0], "|---" * len(heads) + "|", *lines[1:]))


def stacked_table() -> tuple[str, list[str]]:
    """(stored name -> module and tensor, the names of two experts' projections in one such tensor)."""
    rows = []
    for name in STACKED_NAMES:
        group = group_tensors([_info(f"mlp.experts.{name}")]).groups[0]
        rows.append((f"`mlp.experts.{name}`", f"`{group.module}`", f"`{next(iter(group.tensors))}`"))
    form = next(form for form in FORMS if form.tensors[0].shapes == ("[E, N, K]",))
    match = FormMatch(form=form, dims={"E": 2, "N": 2, "K": 1}, roles={})
    names = [claim.module for claim in claims_of("plain", "mlp.experts.gate_up_proj", match, None)]
    return table(("stored", "module", "tensor"), rows), names


def kv_scale_table() -> str:
    """Accepted names of KV-cache scales, each with what it is read as."""
    rows = []
    for name in KV_SCALE_NAMES:
        owner = kv_owner(name)
        if owner is not None:
            rows.append((f"`{name}`", f"`{owner[1]}` of `{owner[0]}`"))
    return table(("tensor", "read as"), rows)


def waiver_table() -> str:
    """Reasons, each with the tensors that are left alone for it."""
    found: dict[str, list[str]] = {}
    for waiver in waivers_for([_ROTARY_TABLE]):
        name = "*.rotary_emb.inv_freq" if waiver.prefix == _ROTARY_TABLE else f"{waiver.prefix}*"
        found.setdefault(waiver.reason, []).append(f"`{name}`")
    found[INPUT_SCALE_WEIGHT_ONLY] = ["`input_scale`, `input_global_scale`"]
    found[INPUT_SCALE_DYNAMIC] = ["`input_scale`"]
    found[SYMMETRIC] = ["`weight_zero_point`, `input_zero_point` (zero), `weight_shape`"]
    found[KV_SCALES] = ["the names of the section above"]
    return table(("tensors", "reason"), [(", ".join(names), reason) for reason, names in found.items()])


def activation_table() -> str:
    """What is executed for each kind of module under each request, and below it the warnings."""
    notes: list[str] = []
    rows = []
    for words, claim, wanted in _modules():
        declared = DeclaredScheme(weight="", algorithm="", activations=wanted, where="")
        cells = [f"{words} | {wanted}"]
        for _, request in _REQUESTS:
            executed = executed_activations(claim, declared, request)
            cell = executed.activations
            if executed.warning:
                if executed.warning not in notes:
                    notes.append(executed.warning)
                cell += f" ({notes.index(executed.warning) + 1})"
            cells.append(cell)
        rows.append(cells)
    heads = ("module", "declared", *(words for words, _ in _REQUESTS))
    said = "\n".join(f"{number}. Warned: {text}." for number, text in enumerate(notes, 1))
    return f"{table(heads, rows)}\n\n{said}"


def refused_tables() -> str:
    """quant_method, tensor names and ModelOpt algorithms that are recognized and refused."""
    methods = [(f"`{method}`", what) for method, what in METHODS.items()]
    names = [(f"`{suffix}`", what) for suffix, what in SIGNATURES.items()]
    algorithms = ", ".join(f"`{name.upper()}`" for name in UNSUPPORTED)
    return "\n\n".join(
        (
            table(("`quant_method`", "what it is"), methods),
            table(("tensor, where nothing is declared", "looks like"), names),
            f"Algorithms of ModelOpt that are refused: {algorithms}.",
        )
    )


def _modules() -> Iterable[tuple[str, Claim, str]]:
    """(what the module is, a claim on such a module, its declared activations)."""
    modelopt = {name: activations for name, (_, activations) in ALGORITHMS.items()}
    scale, divisor = ("input_scale",), ("input_divisor",)
    return (
        ("ModelOpt `NVFP4`", _claim("modelopt", "nvfp4", scale), modelopt["nvfp4"]),
        ("ModelOpt `W4A16_NVFP4`", _claim("modelopt", "nvfp4", scale), modelopt["w4a16_nvfp4"]),
        ("ModelOpt `NVFP4` without `input_scale`", _claim("modelopt", "nvfp4", ()), modelopt["nvfp4"]),
        ("ModelOpt `W4A8_NVFP4_FP8`", _claim("modelopt", "nvfp4", scale), modelopt["w4a8_nvfp4_fp8"]),
        ("compressed-tensors NVFP4", _claim("compressed-tensors", "nvfp4", divisor), "fp4"),
        (
            "compressed-tensors NVFP4 without `input_global_scale`",
            _claim("compressed-tensors", "nvfp4", ()),
            "16bit",
        ),
        ("FP8, static", _claim("modelopt", "fp8-tensor", scale), "fp8-static"),
        ("FP8, static, without `input_scale`", _claim("modelopt", "fp8-tensor", ()), "fp8-static"),
        ("FP8 or MXFP8, dynamic", _claim("modelopt", "fp8-row", ()), "fp8-dynamic"),
        ("FP8, weights alone", _claim("compressed-tensors", "fp8-row", ()), "16bit"),
        ("BF16, F16, F32", _claim("plain", "bf16", ()), "16bit"),
    )


def _claim(convention: str, scheme: str, inputs: Sequence[str]) -> Claim:
    form = Form(scheme=scheme, tensors=(), formula="", source="")
    roles = {role: _info(role) for role in ("codes", *inputs)}
    return Claim(module="m", convention=convention, scheme=scheme, shape=(1, 1), roles=roles, form=form)


def _info(name: str) -> TensorInfo:
    return TensorInfo(name=name, dtype="F32", shape=(), file="", begin=0, end=0)
