"""Experts as transformers saves them in FP8: a weight per expert, the scales of all experts in one tensor.

Saving takes the fused weight apart and leaves its companions whole (transformers 5.24 core_model_loading.py,
integrations/finegrained_fp8.py `FP8Experts`): `experts.0.gate_proj.weight` beside
`experts.gate_up_proj_scale_inv` [E, rows of blocks, columns of blocks].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vtensors.forms import FLOAT_DTYPES, Form, TensorForm
from vtensors.records import (
    Claim,
    ClaimRequest,
    DeclaredScheme,
    Refusal,
    StackedPart,
    TensorGroup,
    TensorSource,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vtensors.tensors import TensorInfo

# The fused projection -> the projections whose rows follow each other in it.
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0", "U8")


def _form(scheme: str, scales: str) -> Form:
    return Form(
        scheme=scheme,
        algorithms=("fp8", "mxfp8") if scheme == "fp8-block" else ("fp8", "mxfp8", "fp8 without blocks"),
        formula="e4m3(weight) * weight_scale_inv of its expert",
        source="transformers 5.24 integrations/finegrained_fp8.py FP8Experts",
        tensors=(
            TensorForm(suffix="weight", dtypes=("F8_E4M3",), shapes=("[N, K]",), role="codes"),
            TensorForm(
                suffix="weight_scale_inv",
                dtypes=_SCALE_DTYPES,
                shapes=(scales,),
                role="scale",
                sense="multiplies",
            ),
            TensorForm(
                suffix="activation_scale",
                dtypes=("F32", "BF16"),
                shapes=("[E]",),
                role="input_scale",
                sense="multiplies",
                required=False,
            ),
        ),
    )


BLOCKS = _form("fp8-block", "[E, ceil(N/BN), ceil(K/BK)]")
TENSORS = _form("fp8-tensor", "[E, 1, 1]")


def claim_experts(convention: str, request: ClaimRequest) -> Iterator[Claim | Refusal]:
    """A claim per expert and projection whose scale lies in a tensor of all experts, or why there is none."""
    if request.declaration is None:
        return
    groups = {group.module: group for group in request.groups}
    for group in request.groups:
        owner, _, fused = group.module.rpartition(".")
        scale = group.tensors.get("weight_scale_inv")
        if (
            fused not in _HALVES
            or not owner.endswith(".experts")
            or scale is None
            or "weight" in group.tensors
        ):
            continue
        declared = request.declaration.scheme_of(f"{owner}.0.{_HALVES[fused][0]}")
        if declared is None:
            continue
        problem = _companions_problem(group, scale)
        for expert in range(0 if problem else scale.shape[0]):
            for number, half in enumerate(_HALVES[fused]):
                member = groups.get(f"{owner}.{expert}.{half}")
                if member is None or "weight_scale_inv" in member.tensors:
                    continue
                yield _claim(convention, group, member, declared, expert, number)
        if problem:
            yield Refusal(module=group.module, reason=problem)


def _companions_problem(group: TensorGroup, scale: TensorInfo) -> str:
    others = sorted(set(group.tensors) - {"weight_scale_inv", "activation_scale"})
    if others:
        return f"has no place for '{group.tensors[others[0]].name}' beside scales of all experts"
    if len(scale.shape) != 3 or scale.dtype not in _SCALE_DTYPES:
        return f"wants '{scale.name}' as [E, rows, columns] of a scale dtype, found {scale.describe()}"
    inputs = group.tensors.get("activation_scale")
    if inputs is not None and (inputs.shape != scale.shape[:1] or inputs.dtype not in ("F32", "BF16")):
        return f"wants '{inputs.name}' as F32 or BF16 [{scale.shape[0]}], found {inputs.describe()}"
    return ""


def _claim(
    convention: str,
    group: TensorGroup,
    member: TensorGroup,
    declared: DeclaredScheme,
    expert: int,
    number: int,
) -> Claim | Refusal:
    codes, scale = member.tensors.get("weight"), group.tensors["weight_scale_inv"]
    if codes is None or set(member.tensors) != {"weight"}:
        return Refusal(module=member.module, reason=f"wants nothing but 'weight' beside '{scale.name}'")
    if codes.dtype != "F8_E4M3" or len(codes.shape) != 2:
        return Refusal(module=member.module, reason=f"wants F8_E4M3 [N, K], found {codes.describe()}")
    (rows, k), halves = codes.shape, len(_HALVES[group.module.rpartition(".")[2]])
    grids = {(1, 1), (halves, 1)} if declared.block is None else {_grid(declared.block, rows, k, halves)}
    if scale.shape[1:] not in grids:
        wanted = " or ".join(str([scale.shape[0], *grid]) for grid in sorted(grids))
        reason = f"wants '{scale.name}' of shape {wanted} for weights [{rows}, {k}], found {scale.describe()}"
        return Refusal(module=member.module, reason=reason)
    roles = {"codes": codes, "scale": scale}
    if "activation_scale" in group.tensors:
        roles["input_scale"] = group.tensors["activation_scale"]
    form = TENSORS if declared.block is None else BLOCKS
    return Claim(
        module=member.module,
        convention=convention,
        scheme=form.scheme,
        shape=(rows, k),
        roles=roles,
        form=form,
        declared=declared,
        part=StackedPart(expert=expert, row_begin=number * rows, row_end=(number + 1) * rows),
    )


def _grid(block: tuple[int, int], rows: int, k: int, halves: int) -> tuple[int, int]:
    """Scales of one expert: of the fused rows, and at least one row of them for each half."""
    return max(-(-halves * rows // block[0]), halves), -(-k // block[1])


def has_own_weight(claim: Claim) -> bool:
    """Whether the claim is of `claim_experts`: the weight is the expert's own, the scale is of all experts."""
    return claim.part is not None and len(claim.roles["codes"].shape) == 2


def read_expert_roles(claim: Claim, source: TensorSource) -> dict[str, Tensor]:
    """codes [N, K]; scale of the expert, whole; input_scale []."""
    expert = claim.part.expert if claim.part else 0
    views = {role: source.view(info) for role, info in claim.roles.items()}
    return {role: view if role == "codes" else view[expert] for role, view in views.items()}


def scale_of_rows(scale: Tensor, claim: Claim, block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """The part of a fused projection's scale for the claim's rows, and the rows of its first block before them.

    scale: [R, C] of one expert, or [] . block: rows and columns of a scale; None: one scale for the rows.
    """
    part = claim.part
    if part is None or scale.ndim != 2:
        return scale, 0
    rows = part.row_end - part.row_begin
    half, halves = part.row_begin // rows, 2 if "gate_up_proj" in claim.roles["scale"].name else 1
    if block is None:
        return scale.reshape(-1)[half if scale.numel() > 1 else 0], 0
    if -(-halves * rows // block[0]) < scale.shape[0]:  # a block spans both halves, yet each has a scale
        return scale[half : half + 1], 0
    return scale[part.row_begin // block[0] : -(-part.row_end // block[0])], part.row_begin % block[0]
