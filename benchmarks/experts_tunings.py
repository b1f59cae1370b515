"""What `experts_sweep.py` tries: forms and grids of the kernels of few tokens, and of the two of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import attrs
import torch
from experts import HIDDEN, NO_BATCH, TOP, WIDTH

from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.experts.batch_form import (
    MOST_TOKENS,
    gate_up_form,
    gate_up_grid,
    outputs_form,
    outputs_grid,
)
from vtensors_kernels.experts.form import MOST_PAIRS, ExpertsTuning, down_form, form_for

# Warps, split, blocks of a stage, blocks of an SM, most stages.
_GATE_UPS = (
    *((8, 4, 4, 2, 8), (8, 4, 4, 2, 1), (8, 4, 2, 2, 8), (8, 8, 2, 2, 8), (8, 8, 2, 3, 8), (8, 8, 1, 2, 8)),
    *((16, 4, 2, 1, 8), (16, 4, 4, 1, 8), (16, 8, 2, 1, 8)),
)
# Warps, blocks of a stage, whether x is held, blocks of an SM, most stages.
_OUTPUTS = (
    *((16, 4, True, 1, 1), (16, 4, True, 1, 2), (16, 4, False, 1, 2), (16, 2, True, 1, 1)),
    *((16, 2, True, 1, 2), (12, 4, True, 1, 1), (12, 4, False, 1, 2), (8, 4, True, 2, 1)),
)
# Tokens -> row tiles of a block of gate_up, and of down.
_TILES = {
    1: ((2, 3, 4, 5, 7), (1, 2)),
    2: ((3, 4, 5, 8, 10), (1, 2)),
    4: ((4, 6, 8, 11, 16), (1, 2, 4)),
    8: ((6, 8, 11, 16), (2, 3, 4, 8)),
}


def tunings(m: int, block_bytes: int) -> Iterator[tuple[str, ExpertsTuning]]:
    """What is tried for m tokens, with its name: the shipped one first, then the two ways that it chooses between."""
    yield "* shipped", ExpertsTuning()
    yield "gate_up, down", ExpertsTuning(batch_pairs=NO_BATCH)
    if m <= MOST_TOKENS:
        yield "batch", ExpertsTuning(batch_pairs=1)
        yield from _batches(m, block_bytes)
    if m <= max(_TILES):
        yield from _few(m, block_bytes)


def _batches(m: int, block_bytes: int) -> Iterator[tuple[str, ExpertsTuning]]:
    """Forms of the two kernels of a batch, as far as their rings fit."""
    target = target_of(torch.cuda.get_device_capability())
    up, out = gate_up_form(HIDDEN, block_bytes, target), outputs_form(WIDTH, block_bytes, target)
    for warps, split, blocks, per, stages in _GATE_UPS:
        form = attrs.evolve(
            up, warps=warps, split=split, stage_blocks=blocks, held=True, blocks_per_sm=per, stages=stages
        )
        grid = gate_up_grid(form, block_bytes, 1, target)
        if grid is not None and grid.blocks == per:
            name = f"batch gate_up warps {warps} split {split} stages {grid.stages} of {blocks}, blocks {per}"
            yield name, ExpertsTuning(batch=(form, None), batch_pairs=1)
    for warps, blocks, held, per, stages in _OUTPUTS:
        form = attrs.evolve(
            out, warps=warps, stage_blocks=blocks, held=held, blocks_per_sm=per, stages=stages
        )
        outputs = outputs_grid(form, block_bytes, HIDDEN, m, TOP, TOP + 1, 132, target)
        if outputs is not None:
            name = f"batch outputs warps {warps} stages {outputs.stages} of {blocks}, held {held:d}, blocks {per}"
            yield name, ExpertsTuning(batch=(None, form), batch_pairs=1)


def _few(m: int, block_bytes: int) -> Iterator[tuple[str, ExpertsTuning]]:
    """Row tiles of gate_up and of down, blocks of weights on their way."""
    size = min(_TILES, key=lambda known: (abs(known - m), known))
    for up, down in product(*_TILES[size]):
        yield f"tiles {up} {down}", ExpertsTuning(tiles=(up, down), batch_pairs=NO_BATCH)
    first, second = form_for(HIDDEN, block_bytes, many=False), down_form(WIDTH, block_bytes)
    for depth, blocks in ((3, 2), (5, 2), (6, 1), (8, 1)):
        form = attrs.evolve(first, depth=depth, blocks_per_sm=blocks)
        yield (
            f"gate_up depth {depth} blocks {blocks}",
            ExpertsTuning(few=(form, None), batch_pairs=NO_BATCH),
        )
    for depth, units in ((3, 2), (4, 2), (6, 2), (3, 4)):
        form = attrs.evolve(second, depth=depth, units=units, blocks_per_sm=2 if units == 2 else 1)
        yield f"down depth {depth} units {units}", ExpertsTuning(direct=form, batch_pairs=NO_BATCH)
    yield "down and finish", ExpertsTuning(direct_pairs=0, batch_pairs=NO_BATCH)
    yield "down alone", ExpertsTuning(direct_pairs=MOST_PAIRS, batch_pairs=NO_BATCH)
