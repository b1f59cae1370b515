"""Forms and grids of the two kernels that take up to 32 tokens through their experts; needs neither torch nor a GPU.

A pair's bits are the same in every form, and those of `experts_linear_*`, so the choice may depend on anything.
"""

from __future__ import annotations

import attrs

from vtensors_kernels.nvfp4.stream_form import shared_limit
from vtensors_kernels.packed_tiles import STEP_COLUMNS, TILE_ROWS, column_steps

# `cuda/include/experts_lists.cuh`, `experts_pieces.cuh`: tokens and pairs of a batch; stages of a ring; static shared
# memory of a block, at most; scales of a stage; a warp's sums of a row tile, twice.
MOST_TOKENS, _MOST_PAIRS, _MOST_STAGES = 32, 256, 8
_STATIC_BYTES, _SCALE_BYTES, _SUM_BYTES = 14 << 10, 64, 1024
_FOUR_SEGMENTS, _MOST_HELD = 4, 4
# Fewest pairs for which they are faster on an H200 than a launch whose blocks have one expert each, by the width of a
# code (`benchmarks/experts_sweep.py`): of 4 bits, of 8.
_FEWEST_PAIRS = (41, 65)
# Shared memory below which an SM has one block of gate and up, and a block of outputs fewer warps, and so rings.
_LITTLE_SHARED, _FEWER_WARPS = 128 << 10, 8


@attrs.frozen(kw_only=True)
class BatchForm:
    """One compiled form, and what its launches keep to.

    steps: column steps of K. tail: K is not a multiple of 128. warps: of a block. split: warps that share a row tile.
    stage_blocks: packed blocks of a stage of a warp's ring. held: activations stay in registers for all row tiles of an
    item. blocks_per_sm: that registers allow, and shared memory where it can. stages: of a ring, at most.
    """

    steps: int
    tail: bool
    warps: int
    split: int
    stage_blocks: int
    held: bool
    blocks_per_sm: int
    stages: int = _MOST_STAGES

    @property
    def defines(self) -> dict[str, int]:
        """The macros, without format."""
        return {
            "VT_STEPS": self.steps,
            "VT_TAIL": int(self.tail),
            "VT_WARPS": self.warps,
            "VT_SPLIT": self.split,
            "VT_STAGE_BLOCKS": self.stage_blocks,
            "VT_HELD": int(self.held),
            "VT_BLOCKS_PER_SM": self.blocks_per_sm,
        }

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    def stage_bytes(self, block_bytes: int) -> int:
        """Of a stage of all warps."""
        return self.warps * (self.stage_blocks * block_bytes + _SCALE_BYTES)

    def most_stages(self, block_bytes: int, beside: int, target: str, blocks_per_sm: int) -> int:
        """Stages of a ring that fit beside so many bytes of a block; 0 where none do."""
        room = shared_limit(target, blocks_per_sm) - _STATIC_BYTES - beside
        return max(0, min(self.stages, _MOST_STAGES, room // self.stage_bytes(block_bytes)))


def gate_up_form(k: int, block_bytes: int, target: str) -> BatchForm:
    """The form of `experts_gate_up_*` for K columns in packed blocks of so many bytes."""
    steps, segments = column_steps(k), 4 if column_steps(k) <= _FOUR_SEGMENTS else 8
    own = 2 if _wide(block_bytes) else 4
    splits = [split for split in (1, 2, 4, 8) if split <= min(steps, segments)]
    split = next((split for split in splits if steps <= own * split), splits[-1])
    return _form(k, warps=8, split=split, stage_blocks=own, blocks_per_sm=1 if _little_shared(target) else 2)


def outputs_form(k: int, block_bytes: int, target: str) -> BatchForm:
    """The form of `experts_outputs_*` for K columns in packed blocks of so many bytes.

    Of 4-bit codes in short rows a stage has all of a piece, and so many warps need no second one: a block then fits
    beside the last one of gate and up.
    """
    wide = _wide(block_bytes)
    little = _little_shared(target)
    warps, stage_blocks = _FEWER_WARPS if little else 12 if wide else 16, 2 if wide and little else 4
    form = _form(k, warps=warps, split=1, stage_blocks=stage_blocks, blocks_per_sm=1)
    if wide:
        return attrs.evolve(form, held=False)
    return attrs.evolve(form, stages=1 if form.steps <= form.stage_blocks else 2)


def _form(k: int, *, warps: int, split: int, stage_blocks: int, blocks_per_sm: int) -> BatchForm:
    steps = column_steps(k)
    even, own = steps % (4 if steps <= _FOUR_SEGMENTS else 8) == 0, -(-steps // split)
    return BatchForm(
        steps=steps,
        tail=k % STEP_COLUMNS > 0,
        warps=warps,
        split=split,
        stage_blocks=min(stage_blocks, own),
        held=even and own <= _MOST_HELD,
        blocks_per_sm=blocks_per_sm,
    )


def _little_shared(target: str) -> bool:
    return shared_limit(target, 1) < _LITTLE_SHARED


def _wide(block_bytes: int) -> bool:
    """Whether a code has 8 bits."""
    return block_bytes >= STEP_COLUMNS * TILE_ROWS


@attrs.frozen(kw_only=True)
class BatchGrid:
    """A launch. blocks: of the grid. tiles: row tiles of a block of `experts_outputs_*`. shared_bytes: dynamic."""

    blocks: int
    tiles: int
    stages: int
    shared_bytes: int


def gate_up_grid(form: BatchForm, block_bytes: int, multiprocessors: int, target: str) -> BatchGrid | None:
    """The launch for any number of tokens; None where no ring fits."""
    beside = form.warps * _SUM_BYTES if form.split > 1 else 0
    for blocks_per_sm in range(form.blocks_per_sm, 0, -1):
        stages = form.most_stages(block_bytes, beside, target, blocks_per_sm)
        if stages >= (min(2, form.stages) if blocks_per_sm > 1 else 1):
            shared = stages * form.stage_bytes(block_bytes) + beside
            return BatchGrid(
                blocks=multiprocessors * blocks_per_sm, tiles=0, stages=stages, shared_bytes=shared
            )
    return None


def outputs_grid(
    form: BatchForm, block_bytes: int, n: int, m: int, top: int, slots: int, multiprocessors: int, target: str
) -> BatchGrid | None:
    """The launch for m tokens of so many slots, whose experts' matrices have n rows; None where no ring fits.

    Blocks run at a time where their sums fit beside a ring, else some after others.
    """
    row_tiles = n // TILE_ROWS
    tiles = -(-row_tiles // (multiprocessors * form.blocks_per_sm))
    while tiles:
        beside = 4 * TILE_ROWS * tiles * m * slots + 4 * m * (top + 1)
        beside = -(-beside // 128) * 128
        stages = form.most_stages(block_bytes, beside, target, form.blocks_per_sm)
        if stages:
            shared = stages * form.stage_bytes(block_bytes) + beside
            return BatchGrid(blocks=-(-row_tiles // tiles), tiles=tiles, stages=stages, shared_bytes=shared)
        tiles -= 1
    return None


def most_outputs_bytes(target: str) -> int:
    """Dynamic shared memory that a launch of `experts_outputs_*` may ask for."""
    return shared_limit(target, 1) - _STATIC_BYTES


def is_batch(m: int, top: int, block_bytes: int, fewest: int | None = None) -> bool:
    """Whether the two kernels are for m tokens of top experts each. fewest: pairs, None = where they are faster."""
    least = _FEWEST_PAIRS[_wide(block_bytes)] if fewest is None else fewest
    return m <= MOST_TOKENS and least <= m * top <= _MOST_PAIRS
