"""The launches of `vtensors_kernels.experts` on the CPU emulator: the same forms, grids and arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from emulation.emulator import emulate
from vtensors_kernels.experts import compiled, form
from vtensors_kernels.experts.packed import PackedExperts

MULTIPROCESSORS = 4


def run(
    packed: PackedExperts,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: Tensor | None = None,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    many: bool = False,
    direct: bool = True,
    tiles: int | None = None,
    seed: int = 0,
    before: float = float("nan"),
) -> tuple[Tensor, Tensor]:
    """(act [pairs, F], out [M, K]). many: grouped; direct: outputs in one launch; tiles: row tiles of a block.

    before: what the memory between the launches holds.
    """
    (m, top), f16 = chosen.shape, int(x.dtype == torch.float16)
    slots, pairs, experts = top + packed.shared, m * top, packed.experts
    packed_format = packed.format
    (linear, function), (down, direct_function) = compiled.sources_of(packed_format)
    forms = [form.form_for(k, packed_format.block_bytes, many=many) for k in (packed.hidden, packed.width)]
    act = torch.full((m * slots, packed.width), before).to(x.dtype)
    y = torch.full((m * slots, packed.hidden), before)
    out = torch.full((m, packed.hidden), float("nan")).to(x.dtype)
    grouped = None
    if many:
        bound = form.most_items(pairs, experts, forms[0].tokens)
        grouped = torch.full((4 + 4 * bound + pairs,), -1, dtype=torch.int32)
        emulate(
            *compiled.GROUP,
            {},
            (1, 1, 1),
            (32 * form.GROUP_WARPS, 1, 1),
            [chosen, grouped, pairs, experts, forms[0].tokens, bound],
            shared_bytes=4 * form.GROUP_WARPS * experts,
            seed=seed,
        )

    def multiply(index: int, n: int, source: Tensor, to: Tensor) -> None:
        grid = form.linear_grid(
            forms[index], n, m, top, experts, MULTIPROCESSORS, many=many, shared=packed.shared, tiles=tiles
        )
        matrix = (packed.gate_up, packed.down)[index]
        args = [matrix.blocks, matrix.row_scale, source, chosen, grouped, to, m, top, experts, n]
        emulate(
            linear,
            function,
            compiled.linear_defines(forms[index], packed_format, f16, index),
            grid.grid,
            (forms[index].threads, 1, 1),
            [*args, matrix.shape[1], grid.bound, grid.tiles],
            shared_bytes=grid.shared_bytes,
            seed=seed,
        )

    multiply(0, 2 * packed.width, x, act)
    beside, stride = [gate, shared, residual], 0 if gate is None else gate.stride(0)
    if direct:
        own = form.down_form(packed.width, packed_format.block_bytes)
        blocks = form.down_grid(own, packed.hidden, packed.width, m, slots, MULTIPROCESSORS, tiles=tiles)
        assert blocks is not None
        emulate(
            down,
            direct_function,
            compiled.down_defines(own, packed_format, f16),
            blocks.grid,
            (own.threads, 1, 1),
            [
                *(packed.down.blocks, packed.down.row_scale, act, chosen, weights, *beside, out, stride),
                *(m, top, experts, slots, packed.hidden, packed.width, blocks.tiles),
            ],
            shared_bytes=blocks.shared_bytes,
            seed=seed,
        )
        return act, out
    multiply(1, packed.hidden, act, y)
    emulate(
        *compiled.FINISH,
        {"VT_F16": f16},
        (-(-packed.hidden // (compiled.FINISH_COLUMNS * compiled.FINISH_THREADS)), m, 1),
        (compiled.FINISH_THREADS, 1, 1),
        [y, chosen, weights, *beside, out, stride, m, top, experts, slots, packed.hidden],
        seed=seed,
    )
    return act, out
