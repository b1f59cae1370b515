"""What each tensor's bytes are checked for: its kind, from its role in a claim or else from its dtype."""

from __future__ import annotations

import enum

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.forms import FLOAT_DTYPES, UNUSED_ROLE
from vtensors.modules import Module
from vtensors.tensors import TensorInfo

_E8M0 = ("U8", "F8_E8M0")
_STRICT = ("global_scale", "global_divisor", "input_scale", "input_divisor")


class Kind(enum.Enum):
    """What the bytes of a tensor are."""

    PLAIN = "plain"
    """Floats that must be finite."""

    E4M3_CODES = "e4m3-codes"
    """FP8 codes: no NaN."""

    E2M1_CODES = "e2m1-codes"
    """FP4 codes: every one is legal; it is only noticed whether all are zero."""

    E4M3_SCALE = "e4m3-scale"
    """Block scales of NVFP4: no NaN, not negative, zero over zero codes only."""

    E8M0_SCALE = "e8m0-scale"
    """Powers of two: no NaN."""

    FLOAT_SCALE = "float-scale"
    """Finite and above zero; a row's or block's may be zero over zero codes."""

    PRE_SCALE = "pre-scale"
    """Finite."""

    ZERO_POINT = "zero-point"
    """Zero."""

    OTHER = "other"
    """Nothing is known of them: they are only read."""


@attrs.frozen(kw_only=True, slots=True)
class Subject:
    """A tensor to check. modules: those that it is a part of, empty for one that nobody claims. role: there.

    zero_is_legal: a zero scale must be held against the codes below it before it is a fault.
    """

    info: TensorInfo
    kind: Kind
    modules: tuple[Module, ...] = ()
    role: str = ""
    zero_is_legal: bool = False


def subjects(checkpoint: Checkpoint) -> list[Subject]:
    """Every tensor of the checkpoint in the order of the files, each once."""
    owners: dict[str, tuple[str, list[Module]]] = {}
    for module in checkpoint.modules.values():
        for role, info in module.claim.roles.items():
            owners.setdefault(info.name, (role, []))[1].append(module)
    found = []
    for info in checkpoint.snapshot.tensors.values():
        role, modules = owners.get(info.name, ("", []))
        kind = _kind(info, role)
        found.append(
            Subject(
                info=info,
                kind=kind,
                modules=tuple(modules),
                role=role,
                zero_is_legal=kind is Kind.E4M3_SCALE
                or (role == "scale" and any(m.scheme in ("fp8-row", "fp8-block") for m in modules)),
            )
        )
    return sorted(found, key=lambda subject: (subject.info.file, subject.info.begin))


def _kind(info: TensorInfo, role: str) -> Kind:
    is_float = info.dtype in FLOAT_DTYPES
    if role.endswith("zero_point"):
        return Kind.ZERO_POINT
    if role == UNUSED_ROLE:
        return Kind.OTHER
    if role == "pre_scale" and is_float:
        return Kind.PRE_SCALE
    if role == "block_scale" and info.dtype == "F8_E4M3":
        return Kind.E4M3_SCALE
    if role == "scale" and info.dtype in _E8M0:
        return Kind.E8M0_SCALE
    if (role == "scale" or role in _STRICT) and is_float:
        return Kind.FLOAT_SCALE
    if role == "codes" and info.dtype == "U8":
        return Kind.E2M1_CODES
    # KV-cache scales have rules of their own.
    if is_float and not info.name.endswith(
        (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
    ):
        return Kind.PLAIN
    return Kind.E4M3_CODES if info.dtype == "F8_E4M3" else Kind.OTHER
