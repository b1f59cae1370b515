"""Compile-time forms of `linear_*_wgmma_segments` and which one serves a shape; needs neither torch nor a GPU.

A row's bits are the same in every form, so the choice may depend on anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from vtensors.errors import RequestError
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES, column_steps, row_tiles

# Tokens of a product: the kernel computes this many, whatever M is.
WIDTHS = (24, 32)
MAX_TOKENS = WIDTHS[-1]
# Segments of a row's sum, as in `cuda/include/stream_layout.cuh`.
SEGMENTS = 8
# Warpgroups of a block -> column steps of a weight copy, copies a warp has room for; of blocks of 4-bit and of 8-bit
# codes. Five warpgroups leave too few registers, and clusters that share x were slower at every shape measured.
RINGS = {2: (4, 3), 3: (4, 2), 4: (3, 2)}
WIDE_RINGS = {2: (4, 2), 3: (3, 2), 4: (2, 2)}
_MAX_STAGES = 8
CLUSTERS = (1,)
# `cuda/include/segments_form.cuh`: nodes of the tree that a block may have to give away, that a warp keeps.
_PLACES, _KEPT_NODES = 7, 2
# Dynamic shared memory of a block on sm_90 (CUDA programming guide, compute capability 9.0): 227 KB.
SHARED_BYTES = 227 << 10

# Microseconds, fitted to 39 forms on an H200 (4 % rms, `benchmarks/segments_sweep.py`): of both launches; of a MB of
# weights; of a column step of 64 rows: decoding, and the products of 32 tokens; of a step of a block, whatever its
# rows; of handing over sums.
_LAUNCH, _MEGABYTE, _ROWS, _PRODUCTS, _STEP, _EXCHANGE = 4.9, 0.18, 0.012, 0.076, 0.11, 3.95


@attrs.frozen(kw_only=True)
class SegmentsForm:
    """One compiled form and its grid.

    tokens: of a product, from WIDTHS. warpgroups: of 64 rows each, in a block. cluster: blocks that share x.
    blocks: of the grid. chunk: column steps of a weight copy. slots: such copies of a warp. depth: words whose products
    are in flight. block_bytes: of a packed block.
    """

    tokens: int
    warpgroups: int
    cluster: int
    blocks: int
    chunk: int
    slots: int
    depth: int = 2
    block_bytes: int = BLOCK_BYTES

    @property
    def defines(self) -> dict[str, int]:
        """The macros of `cuda/include/segments_form.cuh`, without format and epilogue."""
        return {
            "VT_TOKENS": self.tokens,
            "VT_WARPGROUPS": self.warpgroups,
            "VT_CLUSTER": self.cluster,
            "VT_STAGES": self.stages,
            "VT_CHUNK": self.chunk,
            "VT_SLOTS": self.slots,
            "VT_DEPTH": self.depth,
        }

    @property
    def warps(self) -> int:
        """Row tiles of a block."""
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block: the consumers and a warpgroup that fetches."""
        return 32 * (self.warps + 4)

    @property
    def stages(self) -> int:
        """Stages of x: as many as there is room for."""
        rest = SHARED_BYTES - self._other_bytes
        return min(_MAX_STAGES, rest // (self.tokens * 256 + 16))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, by the formula of the source's `Layout`."""
        return self.stages * (self.tokens * 256 + 16) + self._other_bytes

    @property
    def node_bytes(self) -> int:
        """Nodes of the tree in global memory."""
        return self.blocks * _PLACES * self.warps * self._node_bytes

    @property
    def _node_bytes(self) -> int:
        return self.tokens * 16 * 4

    @property
    def _other_bytes(self) -> int:
        ring = self.slots * (self.chunk * self.block_bytes + 16)
        return self.warps * (_KEPT_NODES * self._node_bytes + ring)

    def groups(self, n: int) -> int:
        """Row groups of a matrix of n rows: what a cluster computes at a time."""
        return -(-row_tiles(n) // (self.warps * self.cluster))

    def fitted(self, n: int) -> SegmentsForm:
        """The same compiled form with no more clusters than an n-row matrix has segments of groups."""
        most = self.groups(n) * SEGMENTS
        return attrs.evolve(self, blocks=min(self.blocks // self.cluster, most) * self.cluster)


def choose_form(
    n: int, k: int, tokens: int, multiprocessors: int, block_bytes: int = BLOCK_BYTES
) -> SegmentsForm:
    """The form with the least modelled time for an n x k matrix, of any width that holds so many tokens.

    Errors: RequestError outside 1..32 tokens.
    """
    widths = [width for width in WIDTHS if 1 <= tokens <= width]
    if not widths:
        raise RequestError("too many or no tokens", seen=str(tokens), accepted=f"1..{MAX_TOKENS}")
    forms = (form for width in widths for form in candidates(n, width, multiprocessors, block_bytes))
    return min(forms, key=lambda form: modelled_time(n, k, form))


def candidates(
    n: int, tokens: int, multiprocessors: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[SegmentsForm]:
    """Every number of warpgroups and cluster size, in the fewest clusters whose longest range is as short as can be."""
    for form in compiled_forms(tokens, block_bytes):
        units = form.groups(n) * SEGMENTS
        longest = -(-units // (multiprocessors // form.cluster))
        # Ranges of whole groups need no exchange.
        lengths = {longest, -(-longest // SEGMENTS) * SEGMENTS}
        for length in sorted(lengths):
            yield attrs.evolve(form, blocks=-(-units // length) * form.cluster)


def compiled_forms(tokens: int, block_bytes: int = BLOCK_BYTES) -> Iterator[SegmentsForm]:
    """Every compiled form of one width, with the smallest grid."""
    rings = RINGS if block_bytes == BLOCK_BYTES else WIDE_RINGS
    for warpgroups, (chunk, slots) in rings.items():
        for cluster in CLUSTERS:
            yield SegmentsForm(
                tokens=tokens,
                warpgroups=warpgroups,
                cluster=cluster,
                blocks=cluster,
                chunk=chunk,
                slots=slots,
                block_bytes=block_bytes,
            )


def modelled_time(n: int, k: int, form: SegmentsForm) -> float:
    """Microseconds of both launches on an H200: the longest range of a block, then exchanges of sums."""
    units, clusters = form.groups(n) * SEGMENTS, form.blocks // form.cluster
    longest = -(-units // clusters)
    step = form.warpgroups * (_ROWS + _PRODUCTS * form.tokens / 32) + _STEP
    megabytes = row_tiles(n) * column_steps(k) * form.block_bytes / 1e6
    time = _LAUNCH + _MEGABYTE * megabytes + longest * column_steps(k) / SEGMENTS * step
    return time if units % clusters == 0 and longest % SEGMENTS == 0 else time + _EXCHANGE
