"""Compile-time forms of the grouped expert linears and their grids; needs neither torch nor a GPU.

A pair's bits are the same in every form, so the choice may depend on anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from vtensors_kernels.compiling.architectures import COMPILED
from vtensors_kernels.experts.batch_form import BatchForm
from vtensors_kernels.nvfp4.stream_form import shared_limit
from vtensors_kernels.packed_tiles import STEP_COLUMNS, TILE_ROWS, column_steps

# `cuda/include/experts_stream.cuh`: column steps up to which four segments are all; bytes of a segment's sums, and of
# the scales of a row tile.
_FOUR_SEGMENTS, _SEGMENT_BYTES, _SCALE_BYTES, _TOKENS = 4, 512, 64, 8
# `experts_items.cuh`, `experts_down.cuh`: pairs among which a block finds its own; slots of a token.
MOST_PAIRS, MOST_SLOTS = 256, 16
# `experts_group.cu`: a table of a row a warp, and bytes beside it.
MOST_EXPERTS, GROUP_WARPS = 1024, 32
_GROUP_STATIC = 128
# Pairs up to which one launch makes the outputs from the activations, reading an expert again for every token.
DIRECT_PAIRS = 96
# Tokens of a launch where they are grouped, for up to 16 experts of each: the scratch is 4 bytes for each of their
# pairs and output features, and a grid has no more than 65535 blocks in y.
CHUNK, _CHUNK_PAIRS = 2048, 1 << 15
# Most row tiles of a block, and how many times as many it may have where the blocks of all items then run at a time;
# bytes of a warp's list of pairs. Most row tiles of a block of `experts_down_*`, and the dynamic shared memory that its
# launches may ask for (48 KB without asking, and what the kernel has besides).
_MOST_TILES, _AT_A_TIME, _LISTS = {1: 8, 2: 8, 4: 4}, 2, 512
_MOST_DOWN_TILES, MOST_DOWN_BYTES = 16, (48 << 10) - 128


@attrs.frozen(kw_only=True)
class ExpertsForm:
    """One compiled form.

    token_tiles: groups of 8 tokens that share a decoded block. segments: of a row, one a warp; units: row tiles that
    the warps work on at a time. depth: blocks of a warp on their way. blocks_per_sm: that registers must allow.
    tail: K is not a multiple of 128.
    """

    token_tiles: int
    segments: int
    units: int
    depth: int
    blocks_per_sm: int
    tail: bool

    @property
    def defines(self) -> dict[str, int]:
        """The macros, without format and epilogue."""
        return {
            "VT_TOKEN_TILES": self.token_tiles,
            "VT_SEGMENTS": self.segments,
            "VT_UNITS": self.units,
            "VT_DEPTH": self.depth,
            "VT_BLOCKS_PER_SM": self.blocks_per_sm,
            "VT_TAIL": int(self.tail),
        }

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.segments * self.units

    @property
    def tokens(self) -> int:
        """Most tokens of an item."""
        return _TOKENS * self.token_tiles

    def shared_bytes(self, tiles: int) -> int:
        """Dynamic shared memory of a block of so many row tiles."""
        return tiles * (self.segments * self.token_tiles * _SEGMENT_BYTES + _SCALE_BYTES)

    @property
    def most_tiles(self) -> int:
        """Of a block."""
        return _MOST_TILES[self.token_tiles] * (8 // self.segments)

    @property
    def most_shared_bytes(self) -> int:
        """What a block of any launch may ask for."""
        return self.shared_bytes(self.most_tiles * (_AT_A_TIME if self.token_tiles == 1 else 1))

    def most_tiles_at_a_time(self, target: str) -> int:
        """Of a block, where those of all items then run at a time: as shared memory allows."""
        if self.token_tiles > 1:
            return self.most_tiles
        room = shared_limit(target, self.blocks_per_sm) - _LISTS * self.threads // 32
        return min(_AT_A_TIME * self.most_tiles, max(self.most_tiles, room // self.shared_bytes(1)))


def form_for(k: int, block_bytes: int, *, many: bool) -> ExpertsForm:
    """The form of `experts_linear_*` for K columns in packed blocks of so many bytes.

    many: for more pairs than a block looks through: up to 32 tokens of an expert at a time.
    """
    four = column_steps(k) <= _FOUR_SEGMENTS
    wide = block_bytes >= STEP_COLUMNS * TILE_ROWS
    return ExpertsForm(
        token_tiles=4 if many else 1,
        segments=4 if four else 8,
        units=2 if four else 1,
        depth=(1 if wide else 2) if many else (2 if wide else 4),
        blocks_per_sm=1 if many else 2,
        tail=k % STEP_COLUMNS > 0,
    )


def down_form(k: int, block_bytes: int) -> ExpertsForm:
    """The form of `experts_down_*`: all weights of a token that chooses eight experts are on their way at once."""
    form = form_for(k, block_bytes, many=False)
    return attrs.evolve(form, depth=form.depth + 1)


@attrs.frozen(kw_only=True)
class LinearGrid:
    """A launch of `experts_linear_*`. bound: blocks in y of chosen experts. tiles: row tiles of a block."""

    form: ExpertsForm
    grid: tuple[int, int, int]
    bound: int
    tiles: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.form.shared_bytes(self.tiles)


def linear_grid(
    form: ExpertsForm,
    n: int,
    m: int,
    top: int,
    experts: int,
    multiprocessors: int,
    *,
    many: bool,
    shared: bool,
    tiles: int | None = None,
    most: int | None = None,
) -> LinearGrid:
    """The launch for m tokens of top experts each, whose matrices have n rows.

    many: whether the pairs are grouped. shared: whether an expert more is everybody's. tiles: row tiles of a block,
    chosen where it is None, up to `most` where all blocks run at a time (`most_tiles_at_a_time`; None = no more than
    elsewhere).
    """
    pairs = m * top
    bound = most_items(pairs, experts, form.tokens) if many else pairs
    items = bound + (-(-m // form.tokens) if shared else 0)
    row_tiles = n // TILE_ROWS
    if tiles is None:
        slots = form.blocks_per_sm
        sizes = range(form.units, (most or form.most_tiles) + 1, form.units)
        tiles = balanced_tiles(row_tiles, items, multiprocessors, slots, sizes) or form.most_tiles
        tiles = min(tiles, -(-row_tiles // form.units) * form.units)
    return LinearGrid(form=form, grid=(-(-row_tiles // tiles), items, 1), bound=bound, tiles=tiles)


def balanced_tiles(
    row_tiles: int, items: int, multiprocessors: int, blocks_per_sm: int, sizes: Iterable[int]
) -> int | None:
    """Row tiles of a block: the first of the sizes, which rise, with which all blocks run at a time; None if none does.

    items: of so many row tiles each. Two blocks of a multiprocessor hide each other's latency, so that more of fewer
    tiles are better where they fit, even where some multiprocessors have more in all (`benchmarks/experts_sweep.py`).
    """
    room = multiprocessors * blocks_per_sm
    return next((tiles for tiles in sizes if -(-row_tiles // tiles) * items <= room), None)


@attrs.frozen(kw_only=True)
class DownGrid:
    """A launch of `experts_down_*`. tiles: row tiles of a block. shared_bytes: dynamic, of a block."""

    grid: tuple[int, int, int]
    tiles: int
    shared_bytes: int


def down_grid(
    form: ExpertsForm, n: int, k: int, m: int, slots: int, multiprocessors: int, *, tiles: int | None = None
) -> DownGrid | None:
    """The launch for m tokens of so many slots, whose experts' matrices are [n, k]; None where none fits.

    tiles: as for `linear_grid`; no more than the shared memory takes.
    """
    row_tiles, of_slot = n // TILE_ROWS, _SCALE_BYTES * (1 + form.segments)
    most = min(_MOST_DOWN_TILES, (MOST_DOWN_BYTES // slots - 2 * k) // of_slot)
    if slots > MOST_SLOTS or most < 1:
        return None
    sizes = range(1, most + 1)
    tiles = min(
        most, tiles or balanced_tiles(row_tiles, m, multiprocessors, form.blocks_per_sm, sizes) or most
    )
    return DownGrid(
        grid=(-(-row_tiles // tiles), m, 1), tiles=tiles, shared_bytes=slots * (2 * k + of_slot * tiles)
    )


def tokens_at_a_time(m: int, top: int) -> int:
    """Tokens of one launch, of m that choose top experts each."""
    return m if m * top <= MOST_PAIRS else max(1, min(CHUNK, _CHUNK_PAIRS // top))


def group_bytes(experts: int) -> int:
    """Dynamic shared memory of the block that groups the pairs of so many experts."""
    return 4 * GROUP_WARPS * experts


def most_experts(target: str) -> int:
    """Experts whose pairs one block can group on that target: its table must fit the shared memory."""
    return min(MOST_EXPERTS, (shared_limit(target, 1) - _GROUP_STATIC) // group_bytes(1))


def targets_by_most_experts() -> dict[int, tuple[str, ...]]:
    """Targets by `most_experts`."""
    found: dict[int, tuple[str, ...]] = {}
    for target in COMPILED:
        most = most_experts(target)
        found[most] = (*found.get(most, ()), target)
    return found


def most_items(pairs: int, experts: int, tokens: int) -> int:
    """The most items of up to so many tokens that the pairs of the experts can make."""
    return min(pairs, experts + pairs // tokens)


@attrs.frozen(kw_only=True)
class ExpertsTuning:
    """What sweeps may set. tiles: row tiles of a block for gate_up and down, None = as the grid wants it.

    few, many: forms of gate_up and down for pairs that a block looks through and for more, None = `form_for`; the two
    of many take as many tokens. direct: the form of one launch that makes the outputs, None = `down_form`, and
    direct_pairs: up to which there is one. batch: forms of the two kernels of a batch, None = as `batch_form.py` has
    them, and batch_pairs: from which on they serve it, None = where they are faster; more than MOST_PAIRS: never.
    """

    tiles: tuple[int | None, int | None] = (None, None)
    few: tuple[ExpertsForm | None, ExpertsForm | None] = (None, None)
    many: tuple[ExpertsForm | None, ExpertsForm | None] = (None, None)
    direct: ExpertsForm | None = None
    direct_pairs: int = DIRECT_PAIRS
    batch: tuple[BatchForm | None, BatchForm | None] = (None, None)
    batch_pairs: int | None = None
