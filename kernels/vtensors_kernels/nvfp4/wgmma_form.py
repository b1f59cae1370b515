"""Compile-time forms of `linear_nvfp4_wgmma` and which one serves a shape; needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import attrs

from vtensors.errors import RequestError
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES
from vtensors_kernels.nvfp4.warpgroup_form import WarpgroupForm
from vtensors_kernels.packed_tiles import column_steps

# Tokens of a product: the kernel computes this many, whatever M is.
WIDTHS = (16, 32, 48, 64)
# Warpgroups of a block -> column steps of a weight copy, copies a warp has room for. At 48 and 64 tokens these took
# up to 6 % less (lm_head once 12 %) on an H200 than copies of 2 in rings of 8, 10 and 12 column steps.
RINGS = {2: (4, 3), 3: (4, 2), 4: (3, 2)}
CLUSTERS = (1, 2)

# Microseconds, fitted to 354 forms of ten matrices on an H200 at 1980 MHz (benchmarks/results/wgmma-forms-h200.json;
# 8 % off, root mean square). Memory and arithmetic add up there, they do not hide each other.
# Of a launch: both kernels and the first copies.
_LAUNCH = 3.2
# Of a column step of 64 rows: decoding; its share of memory where 132 blocks read; the products of 64 tokens.
_DECODE, _MEMORY, _PRODUCTS = 0.073, 0.102, 0.059
# Of a column step of a block, whatever its warpgroups: waits; x of 64 tokens; a cluster's waits for each of its
# warpgroups that there are fewer than 5.
_STEP, _X, _CLUSTER = 0.092, 0.046, 0.0135
# Of sums given to another block: the first and the last; those of 4 warpgroups and 64 tokens for each part.
_EXCHANGE, _PART = 2.7, 0.8
# Most ranges of a group of rows, by cluster size: at 48 and 64 tokens more of them were nowhere 3 % faster.
_RANGES = {1: 2, 2: 5}


@attrs.frozen(kw_only=True)
class WgmmaForm(WarpgroupForm):
    """A form of `cuda/sm90/linear_nvfp4_wgmma.cu`.

    group: words decoded before their products, which then follow one another.
    """

    most_stages: ClassVar[int] = 12

    group: int = 1

    @property
    def defines(self) -> dict[str, int]:
        """The macros of the source, without format and epilogue."""
        return {**super().defines, "VT_GROUP": self.group}

    @property
    def partial_bytes(self) -> int:
        """Sums that blocks give each other: two places a block."""
        return self.blocks * 2 * self.warps * 16 * self.tokens * 4

    @property
    def other_bytes(self) -> int:
        """Shared memory of the rings."""
        return self.warps * self.slots * (self.chunk * BLOCK_BYTES + 8)

    def fitted(self, n: int, k: int) -> WgmmaForm:
        """The same compiled form with no more clusters than an n x k matrix has places."""
        return self.with_clusters(self.groups(n) * column_steps(k))


def choose_form(n: int, k: int, tokens: int, multiprocessors: int) -> WgmmaForm:
    """The form with the least modelled time for an n x k matrix; tokens: one of WIDTHS.

    Errors: RequestError for a width that is not compiled.
    """
    if tokens not in WIDTHS:
        raise RequestError("no such width", seen=str(tokens), accepted=", ".join(map(str, WIDTHS)))
    return min(candidates(n, k, tokens, multiprocessors), key=lambda form: modelled_time(n, k, form))


def width_of(tokens: int) -> int:
    """The narrowest width that holds so many tokens. Errors: RequestError outside 1..64."""
    for width in WIDTHS:
        if 1 <= tokens <= width:
            return width
    raise RequestError("too many or no tokens", seen=str(tokens), accepted=f"1..{WIDTHS[-1]}")


def modelled_time(n: int, k: int, form: WgmmaForm) -> float:
    """Microseconds of both launches on an H200: the longest range of a block, then exchanges of sums."""
    steps, groups, clusters = column_steps(k), form.groups(n), form.blocks // form.cluster
    places, tokens, warpgroups = groups * steps, form.tokens / 64, form.warpgroups
    step = warpgroups * (_DECODE + _MEMORY * form.blocks / 132 + _PRODUCTS * tokens)
    step += _STEP + _X * tokens / form.cluster + _CLUSTER * (form.cluster - 1) * (5 - warpgroups)
    time = _LAUNCH + -(-places // clusters) * step
    if places % clusters == 0 and (places // clusters) % steps == 0:
        return time
    parts = clusters / groups if clusters % groups == 0 else clusters / groups + 1
    return time + _EXCHANGE + _PART * parts * warpgroups / 4 * tokens


def candidates(n: int, k: int, tokens: int, multiprocessors: int) -> Iterator[WgmmaForm]:
    """Every number of warpgroups and cluster size, with a whole number of ranges a group or the whole device.

    The whole device cuts groups anywhere, so that some have a part more: for clusters, or where every block has
    a group and more.
    """
    for warpgroups, (chunk, slots) in RINGS.items():
        for cluster in CLUSTERS:
            whole = multiprocessors // cluster * cluster
            form = WgmmaForm(
                tokens=tokens, warpgroups=warpgroups, cluster=cluster, blocks=whole, chunk=chunk, slots=slots
            ).fitted(n, k)
            groups, clusters = form.groups(n), form.blocks // form.cluster
            if clusters <= groups or (cluster > 1 and clusters <= _RANGES[cluster] * groups):
                yield form
            for ranges in range(1, min(clusters // groups, _RANGES[cluster]) + 1):
                yield attrs.evolve(form, blocks=ranges * groups * cluster)
