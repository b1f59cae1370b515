"""What the writers of the built-in conventions share: renaming, scalars, scale shapes, refusals."""

from __future__ import annotations

from math import prod

from vtensors.conversion.changes import WIDEN, exponents_to_float32, reciprocal_float32
from vtensors.errors import RequestError
from vtensors.records import Layout, OutputTensor, WeightToWrite

EXPONENTS = ("U8", "F8_E8M0")


def refuse(weight: WeightToWrite, field: str, convention: str, why: str, fix: str = "") -> RequestError:
    """The error for a field that a convention cannot express."""
    return RequestError(
        f"{convention} cannot express {field}: {why}",
        tensor=weight.module,
        seen=f"{weight.scheme}, activations {weight.activations}, {field}",
        fix=fix or "convert to another convention, or --to plain:bf16",
    )


def refuse_roles(weight: WeightToWrite, convention: str, names: dict[str, str]) -> None:
    """Raises RequestError for the first role of the weight that is among `names` (role -> field on disk)."""
    for role, field in names.items():
        if role in weight.roles:
            raise refuse(weight, field, convention, "there is no place for it")


def as_stored(
    weight: WeightToWrite, role: str, suffix: str, shape: tuple[int, ...] | None = None
) -> OutputTensor:
    """The role's bytes unchanged. shape: another one of as many elements."""
    layout = weight.roles[role]
    return OutputTensor(
        suffix=suffix, dtype=layout.dtype, shape=layout.shape if shape is None else shape, role=role
    )


def optional_bias(weight: WeightToWrite) -> tuple[OutputTensor, ...]:
    """The bias, where there is one."""
    return (as_stored(weight, "bias", "bias"),) if "bias" in weight.roles else ()


def scalar(
    weight: WeightToWrite,
    suffix: str,
    shape: tuple[int, ...],
    *,
    multiplier: str,
    divisor: str,
    divides: bool,
) -> tuple[OutputTensor, ...]:
    """One F32 value that multiplies or divides, whichever of the two roles the weight has; () without either.

    divides: the sense in the output. Raises RequestError for more than one value.
    """
    role = multiplier if multiplier in weight.roles else divisor
    if role not in weight.roles:
        return ()
    layout = weight.roles[role]
    if prod(layout.shape) != 1:
        raise RequestError(
            f"'{suffix}' holds one value",
            tensor=weight.module,
            seen=f"{role} {layout.dtype} {list(layout.shape)}",
            accepted="one value per matrix",
            fix="choose another target for this checkpoint",
        )
    turn = (role == divisor) != divides
    change = reciprocal_float32 if turn else WIDEN[layout.dtype]
    return (OutputTensor(suffix=suffix, dtype="F32", shape=shape, role=role, change=change),)


def widened(weight: WeightToWrite, role: str, suffix: str, shape: tuple[int, ...]) -> OutputTensor:
    """A scale as F32, exactly, in another shape of as many elements."""
    layout = weight.roles[role]
    change = exponents_to_float32 if layout.dtype in EXPONENTS else WIDEN[layout.dtype]
    return OutputTensor(suffix=suffix, dtype="F32", shape=shape, role=role, change=change)


def float_scale(weight: WeightToWrite, suffix: str, shape: tuple[int, ...]) -> OutputTensor:
    """The weight's scale in its own float dtype; E8M0 becomes F32."""
    if weight.roles["scale"].dtype in EXPONENTS:
        return widened(weight, "scale", suffix, shape)
    return as_stored(weight, "scale", suffix, shape)


def exponent_bytes(weight: WeightToWrite, suffix: str) -> OutputTensor:
    """An E8M0 scale as U8, its bytes unchanged whatever their dtype was called."""
    layout = weight.roles["scale"]
    return OutputTensor(suffix=suffix, dtype="U8", shape=layout.shape, role="scale", change=_same)


def grid(weight: WeightToWrite) -> tuple[int, int]:
    """Rows and columns of the grid of scale blocks."""
    rows, columns = weight.block or (128, 128)
    return -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)


def one_value(layout: Layout, what: str) -> None:
    """Raises RequestError unless the layout holds one value."""
    if prod(layout.shape) != 1:
        raise RequestError(
            f"{what} with more than one value (per head)",
            seen=f"{layout.dtype} {list(layout.shape)}",
            accepted="one value per layer",
            fix="choose another target for this checkpoint",
        )


def _same(data: bytes) -> bytes:
    return data
