"""Compile-time forms of `linear_*_wgmma_segments` and which one serves a shape; needs neither torch nor a GPU.

A row's bits are the same in every form, so the choice may depend on anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import attrs

from vtensors.errors import RequestError
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES
from vtensors_kernels.nvfp4.warpgroup_form import WarpgroupForm
from vtensors_kernels.packed_tiles import column_steps, row_tiles

# Tokens of a product: the kernel computes this many, whatever M is.
WIDTHS = (24, 32)
MAX_TOKENS = WIDTHS[-1]
# Segments of a row's sum, as in `cuda/include/stream_layout.cuh`.
SEGMENTS = 8
# Warpgroups of a block -> column steps of a weight copy, copies a warp has room for; of blocks of 4-bit and of 8-bit
# codes. Five warpgroups leave too few registers, and clusters that share x were slower at every shape measured.
RINGS = {2: (4, 3), 3: (4, 2), 4: (3, 2)}
WIDE_RINGS = {2: (4, 2), 3: (3, 2), 4: (2, 2)}
CLUSTERS = (1,)
# `cuda/include/segments_form.cuh`: nodes of the tree that a block may have to give away, that a warp keeps.
_PLACES, _KEPT_NODES = 7, 2

# Microseconds, fitted to 39 forms on an H200 (4 % rms, `benchmarks/segments_sweep.py`): of both launches; of a MB of
# weights; of a column step of 64 rows: decoding, and the products of 32 tokens; of a step of a block, whatever its
# rows; of handing over sums.
_LAUNCH, _MEGABYTE, _ROWS, _PRODUCTS, _STEP, _EXCHANGE = 4.9, 0.18, 0.012, 0.076, 0.11, 3.95


@attrs.frozen(kw_only=True)
class SegmentsForm(WarpgroupForm):
    """A form of `cuda/include/segments_kernel.cuh`. block_bytes: of a packed block."""

    most_stages: ClassVar[int] = 8

    block_bytes: int = BLOCK_BYTES

    @property
    def node_bytes(self) -> int:
        """Nodes of the tree in global memory."""
        return self.blocks * _PLACES * self.warps * self._node_bytes

    @property
    def other_bytes(self) -> int:
        """Shared memory of the nodes that wait and of the rings."""
        ring = self.slots * (self.chunk * self.block_bytes + 16)
        return self.warps * (_KEPT_NODES * self._node_bytes + ring)

    @property
    def _node_bytes(self) -> int:
        return self.tokens * 16 * 4

    def fitted(self, n: int) -> SegmentsForm:
        """The same compiled form with no more clusters than an n-row matrix has segments of groups."""
        return self.with_clusters(self.groups(n) * SEGMENTS)


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
