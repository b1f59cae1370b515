"""Compile-time forms of the kernels `linear_*_stream` and which one serves a shape; needs neither torch nor a GPU.

A row's bits are the same in every form, so the choice may depend on anything.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, lcm

import attrs

from vtensors.errors import RequestError
from vtensors_kernels.compiling.architectures import SHARED_KIB
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES
from vtensors_kernels.packed_tiles import column_steps, row_tiles

MAX_TOKENS = 32
# `cuda/include/stream_layout.cuh`: segments of a row's sum, token rows of a tile, space between rows of x.
_SEGMENTS, _TILE_TOKENS, _ROW_GAP = 8, 8, 32
_STEP_BYTES = 256
_MOST_STAGES, _FEWEST_STAGES = 8, 2
# Shared memory that the driver takes of each resident block (CUDA C++ programming guide, technical specifications).
_RESERVED = 1024
# A device newer than the table runs portable code; every device so far has at least this much.
_LEAST_SHARED_KIB = min(SHARED_KIB.values())
_CLUSTERED = ("sm_90a",)
# Clusters of more than two blocks leave SMs over at the edges of the chip; 120 of an H200's 132 are used.
_USED_BY_CLUSTERS = 10 / 11


@attrs.frozen(kw_only=True)
class Rule:
    """What of a form does not depend on the shape. Fields as in `StreamForm`, and:

    most_blocks: of a stage. slot_rounds: multiples of the fewest slots. grids: resident blocks of an SM that the
    grid counts on. alone: takes so much shared memory that no SM has two blocks: where the kernel before it still
    holds some SMs, a grid of one block for each would crowd on the others.
    """

    cluster: int
    warps: int
    reducers: int
    blocks_per_sm: int
    token_tiles: int
    row_tiles: int = 1
    most_blocks: int = 6
    slot_rounds: int = 1
    grids: int = 1
    alone: bool = False


# Fastest on an H200 (`benchmarks/linear.py`), by row tiles per SM. A cluster of two halves the columns of x in a block,
# and the work that whole row tiles leave to some SMs only.
_MOST_ROWS = Rule(cluster=1, warps=8, reducers=4, blocks_per_sm=2, token_tiles=1, grids=2)
_MANY_ROWS = Rule(cluster=1, warps=8, reducers=2, blocks_per_sm=2, token_tiles=1, slot_rounds=2)
_MANY_ROWS_TOKENS = Rule(
    cluster=1, warps=8, reducers=2, blocks_per_sm=2, token_tiles=1, slot_rounds=2, grids=2
)
_UNEVEN_ROWS = Rule(cluster=2, warps=8, reducers=2, blocks_per_sm=2, token_tiles=1)
# Of 8-bit codes, by the steps of a whole model (`benchmarks/engine_speed.py`), where other kernels come before.
_UNEVEN_WIDE = Rule(cluster=2, warps=8, reducers=2, blocks_per_sm=2, token_tiles=1, alone=True)
_ONE_TILE = Rule(cluster=2, warps=12, reducers=3, blocks_per_sm=1, token_tiles=1)
_ONE_TILE_ALONE = Rule(cluster=1, warps=16, reducers=4, blocks_per_sm=1, token_tiles=1)
_ONE_TILE_HALF = Rule(cluster=2, warps=12, reducers=1, blocks_per_sm=2, token_tiles=1)
_TWO_TILES = Rule(cluster=2, warps=12, reducers=3, blocks_per_sm=1, token_tiles=2)
_TWO_TILES_MOST = Rule(cluster=2, warps=16, reducers=2, blocks_per_sm=1, token_tiles=2)
# Of 8-bit codes in long rows: x of 16 tokens leaves little room for the rings unless many blocks share it.
_TWO_TILES_LONG = Rule(cluster=8, warps=8, reducers=1, blocks_per_sm=1, token_tiles=2, most_blocks=3)
_FOUR_TILES_SHORT = Rule(cluster=2, warps=8, reducers=2, blocks_per_sm=1, token_tiles=4)
_FOUR_TILES_MANY = Rule(cluster=4, warps=8, reducers=2, blocks_per_sm=1, token_tiles=4, row_tiles=2)
# Groups of 8 tokens -> what is tried after the fastest, the next where x does not fit beside the rings.
_FALLBACKS = {
    1: (_ONE_TILE, Rule(cluster=4, warps=12, reducers=3, blocks_per_sm=1, token_tiles=1)),
    2: (
        _TWO_TILES,
        Rule(cluster=4, warps=8, reducers=2, blocks_per_sm=1, token_tiles=2),
        Rule(cluster=8, warps=8, reducers=1, blocks_per_sm=1, token_tiles=2),
    ),
    4: (
        Rule(cluster=4, warps=8, reducers=2, blocks_per_sm=1, token_tiles=4),
        Rule(cluster=8, warps=8, reducers=1, blocks_per_sm=1, token_tiles=4),
    ),
}
# Without clusters a block holds all columns of x, whose tokens are then what bounds M.
_ALONE = {
    1: (
        Rule(cluster=1, warps=8, reducers=1, blocks_per_sm=2, token_tiles=1, slot_rounds=4, grids=2),
        Rule(cluster=1, warps=8, reducers=1, blocks_per_sm=1, token_tiles=1, slot_rounds=2),
    ),
    2: (Rule(cluster=1, warps=8, reducers=1, blocks_per_sm=1, token_tiles=2, slot_rounds=2),),
    4: (Rule(cluster=1, warps=8, reducers=1, blocks_per_sm=1, token_tiles=4, slot_rounds=2),),
}
# Row tiles per SM: those of a head; two blocks of each SM pay; one block of each does; fewer than an SM has warps for.
_HEAD, _MOST, _MANY, _FEW = 64, 12, 6, 0.6
# Tokens from which most rows are better off with the form of eight; a head's.
_SOME_TOKENS, _SOME_TOKENS_OF_HEAD = 2, 3
# Most that whole row tiles may leave idle, as a factor, before a cluster is better; column steps of a long segment.
_UNEVEN, _LONG = 1.1, 12
# Fewest bytes of weights that a block must be able to hold for a preferred form; less does not hide the memory.
_ENOUGH_RING = 36 << 10


@attrs.frozen(kw_only=True)
class StreamForm:
    """One compiled form, its dynamic shared memory and its grid.

    cluster: blocks that split the columns. warps, reducers: of a block. blocks_per_sm: that registers must allow.
    token_tiles: groups of 8 tokens. row_tiles: that a consumer multiplies with the same x.
    stages: of each consumer's ring. stage_blocks: packed blocks of a stage. slots: row tiles of sums between
    consumers and reducers. shared_bytes: dynamic, of a block. grid: blocks, a multiple of cluster.
    block_bytes: of a packed block.
    """

    cluster: int
    warps: int
    reducers: int
    blocks_per_sm: int
    token_tiles: int
    row_tiles: int
    stages: int
    stage_blocks: int
    slots: int
    shared_bytes: int
    grid: int
    block_bytes: int = BLOCK_BYTES

    @property
    def defines(self) -> dict[str, int]:
        """The macros of `cuda/include/stream_kernel.cuh`, without format and variant."""
        return defines_of(self)

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all consumers' rings."""
        return self.warps * self.stages * self.stage_blocks * self.row_tiles * self.block_bytes

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + self.reducers)

    def fitted(self, n: int, clusters: int) -> StreamForm:
        """The same form with that many clusters, but no more than an n-row matrix has row tiles."""
        return attrs.evolve(self, grid=min(clusters, row_tiles(n)) * self.cluster)


def defines_of(form: StreamForm | Rule) -> dict[str, int]:
    """The macros that a form or a rule is compiled with."""
    return {
        "VT_CLUSTER": form.cluster,
        "VT_WARPS": form.warps,
        "VT_REDUCERS": form.reducers,
        "VT_BLOCKS_PER_SM": form.blocks_per_sm,
        "VT_TOKEN_TILES": form.token_tiles,
        "VT_ROW_TILES": form.row_tiles,
    }


def choose_form(
    n: int, k: int, m: int, multiprocessors: int, target: str, block_bytes: int = BLOCK_BYTES
) -> StreamForm:
    """The form for m tokens and an n x k matrix on a device of that target (`sm_90a`, `compute_80`, ...).

    block_bytes: of a packed block of the matrix. Errors: RequestError for no tokens or more than `serves` gives.
    """
    if 1 <= m <= MAX_TOKENS:
        for rule in _preferred(n, k, m, multiprocessors, target, wide=block_bytes > BLOCK_BYTES):
            form = form_of(rule, n, k, m, multiprocessors, target, block_bytes)
            if form is not None and form.ring_bytes >= _ENOUGH_RING:
                return form
        for rule in _fallbacks(m, target):
            form = form_of(rule, n, k, m, multiprocessors, target, block_bytes)
            if form is not None:
                return form
    raise RequestError(
        "the activations do not fit the kernel",
        seen=f"{m} tokens of {k} columns on {target}",
        accepted=f"1..{serves(k, target, block_bytes)} tokens",
    )


def form_of(
    rule: Rule, n: int, k: int, m: int, multiprocessors: int, target: str, block_bytes: int
) -> StreamForm | None:
    """The rule with as many and as long stages as fit, by the formula of `Layout`; None where two do not fit."""
    own, stride = _SEGMENTS // rule.cluster, rule.warps * rule.cluster // _SEGMENTS
    slots = lcm(stride * rule.row_tiles, rule.cluster * rule.reducers) * rule.slot_rounds
    steps = column_steps(k)
    x_row = -(-steps * own // _SEGMENTS) * _STEP_BYTES + _ROW_GAP
    message = -(-m // 2) * 128
    received = rule.reducers * 2 * rule.cluster * message if rule.cluster > 1 else 0
    # The scale of each token belongs to one variant; there is room for it in all.
    fixed = m * x_row + slots * own * message + received + _TILE_TOKENS * rule.token_tiles * 4
    fixed += 8 * (1 + 2 * slots + 2 * rule.reducers)
    free = shared_limit(target, 1 if rule.alone else rule.blocks_per_sm) - fixed

    def ring(blocks: int) -> int:
        return rule.warps * (blocks * block_bytes * rule.row_tiles + 8)

    length = -(-steps // _SEGMENTS)
    blocks = -(-length // -(-length // rule.most_blocks))
    while blocks > 1 and free // ring(blocks) < _FEWEST_STAGES:
        blocks = -(-blocks // 2)
    stages = min(_MOST_STAGES, free // ring(blocks))
    if stages < _FEWEST_STAGES:
        return None
    usable = multiprocessors * rule.grids // rule.cluster
    if rule.cluster > 2:
        usable = int(usable * _USED_BY_CLUSTERS)
    return StreamForm(
        cluster=rule.cluster,
        warps=rule.warps,
        reducers=rule.reducers,
        blocks_per_sm=rule.blocks_per_sm,
        token_tiles=rule.token_tiles,
        row_tiles=rule.row_tiles,
        stages=stages,
        stage_blocks=blocks,
        slots=slots,
        shared_bytes=max(
            fixed + stages * ring(blocks), shared_limit(target, 2) + _RESERVED if rule.alone else 0
        ),
        grid=min(max(1, usable), row_tiles(n)) * rule.cluster,
        block_bytes=block_bytes,
    )


@lru_cache(maxsize=512)
def serves(k: int, target: str, block_bytes: int = BLOCK_BYTES) -> int:
    """The most tokens of one launch for K columns, 0..32; 0: not even one fits beside the weights' rings.

    Fewer fit as well. Of more some may: the widest cluster, in which a block has least of x, is for 9 tokens and more.
    """
    for m in range(1, MAX_TOKENS + 1):
        rules = _fallbacks(m, target)
        if all(form_of(rule, 16, k, m, 1, target, block_bytes) is None for rule in rules):
            return m - 1
    return MAX_TOKENS


def rules_of(target: str) -> tuple[Rule, ...]:
    """Every rule that may be chosen on the target: what is compiled for it."""
    if target not in _CLUSTERED:
        return tuple(rule for rules in _ALONE.values() for rule in rules)
    preferred = (
        *(_MOST_ROWS, _MANY_ROWS, _MANY_ROWS_TOKENS, _UNEVEN_ROWS),
        *(_ONE_TILE, _ONE_TILE_ALONE, _ONE_TILE_HALF),
        *(_TWO_TILES, _TWO_TILES_MOST, _TWO_TILES_LONG, _FOUR_TILES_SHORT, _FOUR_TILES_MANY),
    )
    every = (*preferred, *(rule for rules in _FALLBACKS.values() for rule in rules))
    return tuple({tuple(defines_of(rule).values()): rule for rule in every}.values())


def shared_limit(target: str, blocks_per_sm: int) -> int:
    """Most dynamic shared memory in bytes of each of so many blocks of an SM."""
    whole = (SHARED_KIB.get(target, _LEAST_SHARED_KIB) << 10) + _RESERVED
    # A block alone may have the same as the table says; others share what an SM has, 1 KiB more than that.
    return int(whole // blocks_per_sm // 128 * 128 - _RESERVED)


def _preferred(n: int, k: int, m: int, multiprocessors: int, target: str, *, wide: bool) -> tuple[Rule, ...]:
    """What was fastest, best first; `_fallbacks` where none of them fits. wide: codes have 8 bits."""
    if target not in _CLUSTERED:
        return ()
    rows = row_tiles(n) / multiprocessors
    most, long = rows >= _MOST, column_steps(k) >= _LONG * _SEGMENTS
    if m > 2 * _TILE_TOKENS:
        return (_FOUR_TILES_SHORT, _FOUR_TILES_MANY) if rows >= 4 else (_FOUR_TILES_SHORT,)
    if m > _TILE_TOKENS:
        if wide and long:
            return (_TWO_TILES_LONG,)
        return (_TWO_TILES_MOST,) if most else (_TWO_TILES,)
    if m > _TILE_TOKENS // 2:
        if most or long:
            return (_ONE_TILE,)
        return (_ONE_TILE_ALONE,) if rows > _MANY or rows < _FEW else (_ONE_TILE_HALF,)
    if most:
        some = _SOME_TOKENS_OF_HEAD if rows >= _HEAD else _SOME_TOKENS
        return (_MOST_ROWS,) if m < some else (_ONE_TILE,)
    if rows >= _MANY and (m > 1 or wide):
        return (_MANY_ROWS_TOKENS, _ONE_TILE)
    if rows > 1 and ceil(rows) / rows > _UNEVEN:
        return (_ONE_TILE,) if long else (_UNEVEN_WIDE if wide else _UNEVEN_ROWS, _ONE_TILE)
    return (_MANY_ROWS,)


def _fallbacks(m: int, target: str) -> tuple[Rule, ...]:
    tiles = 1 if m <= _TILE_TOKENS else 2 if m <= 2 * _TILE_TOKENS else 4
    return _FALLBACKS[tiles] if target in _CLUSTERED else _ALONE[tiles]
