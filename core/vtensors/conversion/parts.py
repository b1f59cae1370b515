"""Where the parts of one weight lie in the source files: whole tensors, or one expert's rows of a stacked one."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import attrs

from vtensors.errors import RequestError
from vtensors.records import Claim, Layout, StackedPart
from vtensors.tensors import DTYPE_BITS, TensorInfo

DEFAULT_BLOCK = (128, 128)


@attrs.frozen(kw_only=True, slots=True)
class StoredPart:
    """A role's bytes on disk: `begin..end` of the file, in the dtype and shape of `layout`.

    transposed: the range holds [K, rows] of one expert, of which columns `columns` are the part; the layout
    is that of the part turned round.
    """

    info: TensorInfo
    layout: Layout
    begin: int
    end: int
    transposed: bool = False
    columns: tuple[int, int] = (0, 0)

    @property
    def whole(self) -> bool:
        """Whether the part is the tensor as it is stored."""
        return not self.transposed and (self.begin, self.end) == (self.info.begin, self.info.end)

    def rows(self, start: int, stop: int) -> StoredPart:
        """Entries start..stop of the first dimension."""
        size = (self.end - self.begin) // max(1, self.layout.shape[0])
        shape = (stop - start, *self.layout.shape[1:])
        return attrs.evolve(
            self,
            layout=Layout(dtype=self.layout.dtype, shape=shape),
            begin=self.begin + start * size,
            end=self.begin + stop * size,
        )


def stored_parts(claim: Claim) -> dict[str, StoredPart]:
    """role -> StoredPart of a claim. Raises RequestError where an expert's rows share a scale block."""
    return {role: stored_part(claim, role) for role in claim.roles}


def stored_part(claim: Claim, role: str) -> StoredPart:
    """The bytes of one role; errors as `stored_parts`."""
    info = claim.roles[role]
    return whole_tensor(info) if claim.part is None else _cut(claim, claim.part, role, info)


def one_expert(claim: Claim) -> tuple[Claim, dict[str, StoredPart]]:
    """A claim on a stacked tensor as one on a stack of that expert alone, and the parts [1, ...] it is read from."""
    part = claim.part
    if part is None:
        return claim, {role: whole_tensor(info) for role, info in claim.roles.items()}
    codes = claim.roles["codes"].shape
    parts = {}
    for role, info in claim.roles.items():
        own = len(codes) == 2 and role in ("codes", "bias")
        shared = not info.shape or role == "pre_scale" or (len(codes) != 2 and info.shape[0] != codes[0])
        if own or shared:
            parts[role] = whole_tensor(info)
        else:
            expert = _expert(part, info)
            layout = Layout(dtype=info.dtype, shape=(1, *expert.layout.shape))
            parts[role] = attrs.evolve(expert, layout=layout)
    return attrs.evolve(claim, part=attrs.evolve(part, expert=0)), parts


def row_window(claim: Claim, parts: Mapping[str, StoredPart], start: int, stop: int) -> dict[str, StoredPart]:
    """The parts of rows start..stop. start: a multiple of the rows of a scale block, where there are blocks."""
    n = claim.shape[0]
    block = claim.declared.block if claim.declared and claim.declared.block else DEFAULT_BLOCK
    cut = {}
    for role, part in parts.items():
        shape = part.layout.shape
        grid = role == "scale" and claim.scheme == "fp8-block" and len(shape) >= 2
        if grid:
            cut[role] = part.rows(start // block[0], -(-stop // block[0]))
        elif role != "pre_scale" and shape and shape[0] == n and prod(shape) != 1 and not part.transposed:
            cut[role] = part.rows(start, stop)
        else:
            cut[role] = part
    return cut


def whole_tensor(info: TensorInfo) -> StoredPart:
    """A tensor as it is stored."""
    return StoredPart(
        info=info, layout=Layout(dtype=info.dtype, shape=info.shape), begin=info.begin, end=info.end
    )


def _cut(claim: Claim, part: StackedPart, role: str, info: TensorInfo) -> StoredPart:
    codes = claim.roles["codes"].shape
    if len(codes) == 2:
        return _own_weight(claim, part, role, info)
    if not info.shape or info.shape[0] != codes[0] or role == "pre_scale":
        return whole_tensor(info)
    expert = _expert(part, info)
    one, size, begin = expert.layout.shape, expert.end - expert.begin, expert.begin
    all_rows = codes[2] if part.transposed else codes[1]
    if part.transposed and len(one) == 2:
        shape = (part.row_end - part.row_begin, one[0])
        return StoredPart(
            info=info,
            layout=Layout(dtype=info.dtype, shape=shape),
            begin=begin,
            end=begin + size,
            transposed=True,
            columns=(part.row_begin, part.row_end),
        )
    if prod(one) == 1:
        return expert
    if role == "scale" and claim.scheme == "fp8-tensor":
        return _half(part, expert)
    if one[0] == all_rows:
        return expert.rows(part.row_begin, part.row_end)
    return _scale_rows(claim, part, expert)


def _own_weight(claim: Claim, part: StackedPart, role: str, info: TensorInfo) -> StoredPart:
    """A weight per expert beside companions of all experts [E, ...]."""
    if role in ("codes", "bias"):
        return whole_tensor(info)
    expert = _expert(part, info)
    if prod(expert.layout.shape) == 1 or role != "scale":
        return expert
    if claim.scheme != "fp8-block":
        return _half(part, expert)
    return _scale_rows(claim, part, expert)


def _half(part: StackedPart, expert: StoredPart) -> StoredPart:
    """The scale of gate or of up, where a fused projection has one for each."""
    half = part.row_begin // (part.row_end - part.row_begin)
    return expert.rows(half, half + 1)


def _expert(part: StackedPart, info: TensorInfo) -> StoredPart:
    one = info.shape[1:]
    size = prod(one) * DTYPE_BITS[info.dtype] // 8
    begin = info.begin + part.expert * size
    return StoredPart(info=info, layout=Layout(dtype=info.dtype, shape=one), begin=begin, end=begin + size)


def _scale_rows(claim: Claim, part: StackedPart, expert: StoredPart) -> StoredPart:
    block = (claim.declared.block if claim.declared and claim.declared.block else DEFAULT_BLOCK)[0]
    if part.row_begin % block:
        raise RequestError(
            "an expert's rows begin inside of a scale block, so its scales cannot be cut out",
            tensor=claim.module,
            seen=f"row {part.row_begin} of '{expert.info.name}', blocks of {block} rows",
            accepted="rows at the border of a block",
            fix="convert to a scheme without blocks, or to plain:bf16",
        )
    return expert.rows(part.row_begin // block, -(-part.row_end // block))
