"""How a convention spells one weight on disk, as a table: the single source for claiming, docs and errors.

A `Form` lists the tensors of one spelling with their dtypes and shape patterns. `match_form` solves the
patterns for N, K (and E for stacked experts) against what a header says, or returns the reason why not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import attrs

from vtensors.tensors import TensorInfo

FLOAT_DTYPES = ("BF16", "F16", "F32")
ANY_SHAPE = "[*]"
# Before a pattern: only where the whole matrix is one block, whose scale writers collapse.
ONE_BLOCK = "one block:"
# The role of a tensor that its writer saved and that nothing reads; conversions leave it out.
UNUSED_ROLE = "unused_scale"
# Published models have at most 512; a header can promise any number of experts that have no elements.
MAX_EXPERTS = 16384


@attrs.frozen(kw_only=True)
class TensorForm:
    """One tensor of a form.

    suffix: the part of the tensor name behind the module name, for example `weight_scale_2`.
    dtypes: accepted safetensors dtype names.
    shapes: accepted shape patterns, for example `[N, K/16]`, `[]`, `[ceil(N/BN), ceil(K/BK)]`.
    role: what the tensor is once read: codes, block_scale, global_scale, scale, input_scale, ...
    sense: `multiplies`, `divides` or `` for tensors that are not scales.
    required: whether the form does not match without it.
    """

    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    role: str
    sense: str = ""
    required: bool = True


@attrs.frozen(kw_only=True)
class Form:
    """One accepted spelling of one scheme.

    scheme: canonical scheme name; tensors: its tensors, the first one carries the codes.
    algorithms: the publisher's words that declare it, lower case; empty = whatever is declared.
    formula: how the stored tensors give the weight, in one line.
    source: where the spelling is defined (producer file@version or the section of a specification).
    """

    scheme: str
    tensors: tuple[TensorForm, ...]
    formula: str
    source: str
    algorithms: tuple[str, ...] = ()

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All suffixes of the form, required ones first as declared."""
        return tuple(tensor.suffix for tensor in self.tensors)


@attrs.frozen(kw_only=True, slots=True)
class FormMatch:
    """A form that fits: the solved dimensions (N, K, E where they occur) and the tensors by role."""

    form: Form
    dims: Mapping[str, int]
    roles: Mapping[str, TensorInfo]


_DIM = re.compile(
    r"(?:ceil\((?P<ceil_of>[A-Z]+)/(?P<ceil_by>[A-Z0-9]+)\)|(?P<name>[A-Z]+)(?:/(?P<by>\d+))?|(?P<number>\d+))$"
)
# `K/16`, but not the K of `ceil(K/128)`.
_GROUPS = re.compile(r"(?<![A-Z(])([A-Z]+)/(\d+)")

Solver = Callable[[int, dict[str, int]], bool]


def _solve_number(wanted: int) -> Solver:
    return lambda size, dims: size == wanted


def _solve_name(name: str, by: int) -> Solver:
    def solve(size: int, dims: dict[str, int]) -> bool:
        return dims.setdefault(name, size * by) == size * by

    return solve


def _solve_ceil(name: str, by: str) -> Solver:
    def solve(size: int, dims: dict[str, int]) -> bool:
        block = int(by) if by.isdigit() else dims[by]
        return name in dims and size == -(-dims[name] // block)

    return solve


@lru_cache(maxsize=1024)
def _parse_shape(pattern: str) -> tuple[Solver, ...]:
    inner = pattern.strip()[1:-1].strip()
    solvers: list[Solver] = []
    for part in inner.split(",") if inner else []:
        found = _DIM.match(part.strip())
        if not found:
            raise ValueError(f"not a shape pattern: {pattern!r}")
        if found["number"]:
            solvers.append(_solve_number(int(found["number"])))
        elif found["name"]:
            solvers.append(_solve_name(found["name"], int(found["by"] or 1)))
        else:
            solvers.append(_solve_ceil(found["ceil_of"], found["ceil_by"]))
    return tuple(solvers)


def match_shape(pattern: str, shape: tuple[int, ...], dims: dict[str, int]) -> bool:
    """Whether the shape fits the pattern under the dimensions known so far; new ones are added to dims."""
    if pattern == ANY_SHAPE:
        return True
    if pattern.startswith(ONE_BLOCK):
        pattern = pattern.removeprefix(ONE_BLOCK).strip()
        if dims["N"] > dims["BN"] or dims["K"] > dims["BK"]:
            return False
    solvers = _parse_shape(pattern)
    return len(solvers) == len(shape) and all(
        solve(size, dims) for solve, size in zip(solvers, shape, strict=True)
    )


def is_pattern(pattern: object) -> bool:
    """Whether it is a shape pattern that `match_shape` can read."""
    if not isinstance(pattern, str):
        return False
    bare = pattern.removeprefix(ONE_BLOCK).strip()
    if not (bare.startswith("[") and bare.endswith("]")):
        return False
    try:
        return bare == ANY_SHAPE or _parse_shape(bare) is not None
    except ValueError:
        return False


def match_form(
    form: Form, group: Mapping[str, TensorInfo], *, block: tuple[int, int] = (128, 128)
) -> FormMatch | str:
    """The match of the form against the tensors of one module (suffix -> TensorInfo), or why it fails.

    Every tensor of the group must have its place in the form: a left-over suffix is a reason.
    block: rows and columns of one scale block, for forms that use BN and BK.
    """
    places = _places(form)
    for suffix in group:
        if suffix not in places:
            return f"has no place for '{group[suffix].name}' (places: {', '.join(places)})"
    for suffix, tensor in places.items():
        if tensor.required and suffix not in group:
            module = next(iter(group.values())).name.rpartition(".")[0] if group else ""
            return f"needs '{module}.{suffix}', which is missing"
    dims = {"BN": block[0], "BK": block[1]}
    roles: dict[str, TensorInfo] = {}
    for suffix, tensor in places.items():
        info = group.get(suffix)
        if info is None:
            continue
        if info.dtype not in tensor.dtypes:
            return f"wants '{info.name}' as {' or '.join(tensor.dtypes)}, found {info.describe()}"
        if not any(match_shape(pattern, info.shape, dims) for pattern in tensor.shapes):
            known = ", ".join(f"{name}={dims[name]}" for name in ("E", "N", "K") if name in dims)
            return (
                f"wants '{info.name}' of shape {' or '.join(tensor.shapes)}"
                f"{f' with {known}' if known else ''}, found {info.describe()}{_indivisible(tensor.shapes, dims)}"
            )
        if tensor.role == "scale" and info.shape == (dims.get("E"),) == (dims.get("N"),):
            return f"cannot tell '{info.name}' {info.describe()} per expert from per row: E = N = {dims['N']}"
        roles[tensor.role] = info
    if dims.get("E", 0) > MAX_EXPERTS:
        return f"has at most {MAX_EXPERTS} experts in one tensor, found {dims['E']}"
    return FormMatch(form=form, dims=dims, roles=roles)


def _indivisible(patterns: tuple[str, ...], dims: Mapping[str, int]) -> str:
    """Which known dimension no writer can cut into the groups of a pattern, `` where all can be."""
    for name, by in (found for pattern in patterns for found in _GROUPS.findall(pattern)):
        if dims.get(name, 0) % int(by):
            return f": {name} = {dims[name]} is not a multiple of {by}"
    return ""


@lru_cache(maxsize=1024)
def _places(form: Form) -> dict[str, TensorForm]:
    return {tensor.suffix: tensor for tensor in form.tensors}
