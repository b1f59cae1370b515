"""The launches of `vtensors_kernels.experts` on the CPU emulator: the same forms, grids and arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from emulation.emulator import emulate
from vtensors_kernels.experts import batch_form, compiled, form
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


def run_batch(
    packed: PackedExperts,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: Tensor | None = None,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    forms: tuple[batch_form.BatchForm, batch_form.BatchForm] | None = None,
    target: str = "sm_90a",
    multiprocessors: int = MULTIPROCESSORS,
    seed: int = 0,
    before: float = float("nan"),
    filled: int = 0xFF,
) -> tuple[Tensor, Tensor]:
    """As `run`, by the two kernels of a batch, with the grids of a device of the target.

    filled: every byte of dynamic shared memory before.
    """
    (m, top), f16, size = chosen.shape, int(x.dtype == torch.float16), packed.format.block_bytes
    slots = top + packed.shared
    up, out_form = forms or (
        batch_form.gate_up_form(packed.hidden, size, target),
        batch_form.outputs_form(packed.width, size, target),
    )
    up_grid = batch_form.gate_up_grid(up, size, multiprocessors, target)
    out_grid = batch_form.outputs_grid(out_form, size, packed.hidden, m, top, slots, multiprocessors, target)
    assert up_grid is not None
    assert out_grid is not None
    act = torch.full((m * slots, packed.width), before).to(x.dtype)
    out = torch.full((m, packed.hidden), float("nan")).to(x.dtype)
    sources, fill = compiled.batch_sources(packed.format), {"VT_SHARED_FILL": filled}
    emulate(
        *sources[0],
        {**compiled.batch_defines(up, packed.format, f16), **fill},
        (up_grid.blocks, 1, 1),
        (up.threads, 1, 1),
        [
            *(packed.gate_up.blocks, packed.gate_up.row_scale, x, chosen, act, m, top, packed.experts),
            *(int(packed.shared), 2 * packed.width, packed.hidden, up_grid.stages),
        ],
        shared_bytes=up_grid.shared_bytes,
        seed=seed,
    )
    beside, stride = [gate, shared, residual], 0 if gate is None else gate.stride(0)
    emulate(
        *sources[1],
        {**compiled.batch_defines(out_form, packed.format, f16), **fill},
        (out_grid.blocks, 1, 1),
        (out_form.threads, 1, 1),
        [
            *(packed.down.blocks, packed.down.row_scale, act, chosen, weights, *beside, out, stride),
            *(m, top, packed.experts, slots, packed.hidden, packed.width, out_grid.tiles, out_grid.stages),
        ],
        shared_bytes=out_grid.shared_bytes,
        seed=seed,
    )
    return act, out
