"""`linear_nvfp4_wgmma_segments` without a GPU: cuts, fetches and the tree of sums replayed, and the choice of forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.nvfp4.warpgroup_form import SHARED_BYTES
from vtensors_kernels.nvfp4.wgmma_segments_form import (
    MAX_TOKENS,
    SEGMENTS,
    WIDTHS,
    SegmentsForm,
    candidates,
    choose_form,
    compiled_forms,
    modelled_time,
)
from vtensors_kernels.packed_tiles import column_steps, row_tiles

SHAPES = [
    *((34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (248320, 5120)),
    *((12288, 2048), (2048, 4096), (1024, 2048), (2048, 512), (1, 16), (40, 144), (700, 1296)),
]
# Of a block's nodes in memory, and the first of a part that begins a group.
PLACES, FIRST = 7, 4


class Work:
    """`Work` of segments_ranges.cuh for one cluster of a grid."""

    def __init__(self, groups: int, steps: int, clusters: int, cluster: int) -> None:
        self.steps, self.units, self.clusters = steps, groups * SEGMENTS, clusters
        self.first, self.last = self.first_unit(cluster), self.first_unit(cluster + 1)
        self.begin, self.end = self.place_of(self.first), self.place_of(self.last)

    def first_unit(self, of: int) -> int:
        return self.units * of // self.clusters

    def owner(self, unit: int) -> int:
        return ((unit + 1) * self.clusters - 1) // self.units

    def segment_step(self, segment: int) -> int:
        return self.steps * segment // SEGMENTS

    def place_of(self, unit: int) -> int:
        return unit // SEGMENTS * self.steps + self.segment_step(unit % SEGMENTS)

    def parts(self) -> list[tuple[int, int, int]]:
        """(group, first segment, end) as the consumers walk them."""
        found = []
        for unit in range(self.first, self.last):
            if unit % SEGMENTS == SEGMENTS - 1 or unit + 1 == self.last:
                start = unit // SEGMENTS * SEGMENTS
                begin, end = max(0, self.first - start), min(SEGMENTS, self.last - start)
                found.append((unit // SEGMENTS, begin, end))
        return found

    def fetched(self, chunk: int) -> list[tuple[int, int, int]]:
        """(group, first column step, steps) of each weight copy, as `Fetch` makes them."""
        place, found = self.begin, []
        while place < self.end:
            group, first = divmod(place, self.steps)
            left = min(self.steps, first + self.end - place) - first
            place += left
            while left > 0:
                found.append((group, first, min(left, chunk)))
                first, left = first + chunk, left - chunk
        return found

    def used(self, chunk: int) -> list[tuple[int, int, int]]:
        """The same as the consumers take them from their rings."""
        found: list[tuple[int, int, int]] = []
        for group, begin, end in self.parts():
            within, last = 0, self.segment_step(end)
            for segment in range(begin, end):
                for step in range(self.segment_step(segment), self.segment_step(segment + 1)):
                    if within == 0:
                        found.append((group, step, 0))
                    found[-1] = (*found[-1][:2], found[-1][2] + 1)
                    within = 0 if within + 1 == chunk or step + 1 == last else within + 1
        return found


class Waiting:
    """`Waiting` and `add_node` of segment_tree.cuh: left children, a four of them in the memory of the grid."""

    def __init__(self, memory: dict[tuple[int, int], Tensor], four: tuple[int, int]) -> None:
        self.kept: dict[int, Tensor] = {}
        self.memory, self.four = memory, four

    def keep(self, level: int, node: Tensor) -> None:
        if level == 2:
            self.memory[self.four] = node
        else:
            self.kept[level] = node

    def take(self, level: int) -> Tensor:
        return self.memory[self.four] if level == 2 else self.kept.pop(level)

    def add(
        self, node: Tensor, segment: int, level: int, begin: int, give: Callable[[Tensor, int], None]
    ) -> Tensor | None:
        for of in range(3):
            if level > of:
                continue
            size = 1 << of
            if segment & size == 0:
                self.keep(of, node)
                return None
            if segment - size < begin:
                give(node, segment)
                return None
            node = self.take(of) + node
            segment -= size
        return node

    def give_rest(self, begin: int, end: int, give: Callable[[Tensor, int], None]) -> None:
        for of in (2, 1, 0):
            size = 1 << of
            first = end // (2 * size) * (2 * size)
            if end & size and first >= begin:
                give(self.take(of), first)


def _refuse(node: Tensor, segment: int) -> None:
    raise AssertionError(f"a node without a sibling at {segment}: {node}")


def _node_level(segment: int, end: int) -> int:
    if segment % 4 == 0 and segment + 4 <= end:
        return 2
    return int(segment % 2 == 0 and segment + 2 <= end)


def _nodes_before(segment: int, begin: int, end: int) -> int:
    count = 0
    while begin < segment:
        begin, count = begin + (1 << _node_level(begin, end)), count + 1
    return count


def _tree(s: list[Tensor]) -> Tensor:
    """What linear_nvfp4_stream adds."""
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))


class Grid:
    """The warps of one row tile of every group, a part of a range at a time, in any order of the ranges."""

    def __init__(self, clusters: int, sums: list[list[Tensor]]) -> None:
        self.sums, self.clusters = sums, clusters
        self.left = [Work(len(sums), 8, clusters, cluster).parts() for cluster in range(clusters)]
        self.memory: dict[tuple[int, int], Tensor] = {}
        self.arrivals, self.done = [0] * len(sums), [torch.empty(0)] * len(sums)

    def run(self, source: torch.Generator) -> list[Tensor]:
        """The sum of every group."""
        while waiting := [cluster for cluster, parts in enumerate(self.left) if parts]:
            self.step(waiting[int(torch.randint(len(waiting), (), generator=source))])
        return self.done

    def step(self, cluster: int) -> None:
        group, begin, end = self.left[cluster].pop(0)
        waiting = Waiting(self.memory, (cluster, FIRST))

        def give(node: Tensor, segment: int) -> None:
            place = (FIRST if begin == 0 else 0) + _nodes_before(segment, begin, end)
            assert place < PLACES
            self.memory[cluster, place] = node

        whole = None
        for segment in range(begin, end):
            whole = waiting.add(self.sums[group][segment], segment, 0, begin, give)
        if whole is None:
            if end < SEGMENTS:
                waiting.give_rest(begin, end, give)
            whole = self.join(cluster, group)
        assert not waiting.kept
        if whole is not None:
            self.done[group] = whole

    def join(self, cluster: int, group: int) -> Tensor | None:
        work = Work(len(self.sums), 8, self.clusters, cluster)
        first, last = work.owner(group * SEGMENTS), work.owner(group * SEGMENTS + SEGMENTS - 1)
        self.arrivals[group] += 1
        if self.arrivals[group] != last - first + 1:
            return None
        segment, waiting, total = 0, Waiting(self.memory, (cluster, FIRST)), None
        for other in range(first, last + 1):
            place = FIRST if segment == 0 else 0
            end = min(SEGMENTS, work.first_unit(other + 1) - group * SEGMENTS)
            while segment < end:
                level = _node_level(segment, end)
                total = waiting.add(self.memory[other, place], segment, level, 0, _refuse)
                place, segment = place + 1, segment + (1 << level)
        assert total is not None
        assert not waiting.kept
        return total


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
def test_every_cut_gives_the_sums_of_the_balanced_tree_bit_for_bit(groups: int) -> None:
    source = torch.Generator().manual_seed(groups)
    sums = [list(torch.randn(SEGMENTS, 64, generator=source) * 1e3) for _ in range(groups)]
    wanted = [_tree(one) for one in sums]
    # The order matters for these numbers: a plain sum differs.
    assert not torch.equal(torch.stack(sums[0]).sum(0), wanted[0])
    for clusters in range(1, groups * SEGMENTS + 1):
        for _ in range(5):
            for ours, tree in zip(Grid(clusters, sums).run(source), wanted, strict=True):
                assert torch.equal(ours, tree), f"{clusters} ranges"


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("clusters", [1, 5, 66, 107, 132])
def test_every_segment_has_one_owner_and_every_column_step_is_fetched_as_it_is_used(
    n: int, k: int, clusters: int
) -> None:
    form = SegmentsForm(tokens=32, warpgroups=5, cluster=1, blocks=clusters, chunk=2, slots=2).fitted(n)
    steps, groups = column_steps(k), form.groups(n)
    every: list[tuple[int, int]] = []
    for cluster in range(form.blocks):
        work = Work(groups, steps, form.blocks, cluster)
        assert work.first < work.last
        assert all(work.owner(unit) == cluster for unit in (work.first, work.last - 1))
        for chunk in (1, 2, 3, 4):
            assert work.fetched(chunk) == work.used(chunk)
        every += [(g, first + i) for g, first, count in work.fetched(3) for i in range(count)]
        # The producer counts places from begin to end and wraps at the end of a row.
        assert [step for _, step in every[len(every) - (work.end - work.begin) :]] == [
            (work.begin + i) % steps for i in range(work.end - work.begin)
        ]
    assert every == [(group, step) for group in range(groups) for step in range(steps)]


def test_a_product_has_the_columns_of_the_streams_product_in_the_same_places() -> None:
    for u in range(4):
        for h in range(2):
            for c in range(4):
                turn = (-16 if c >> 1 else 16) if u & 1 else 0
                # `rows` of stream_consumer.cuh in bytes: four registers of two columns, b.x .. b.w.
                stream = (c * 64 + (c >> 1) * 16 + turn + (u >> 1) * 32) // 2
                for q in range(2):
                    # permute_activations.cu: what lies at k positions 8 q + 2 c, + 1.
                    staged = 32 * c + 8 * (u ^ (c >> 1)) + 4 * h + 2 * q
                    assert staged == stream + 2 * (2 * h + q)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 17, 24, 25, 32])
def test_the_chosen_form_fits_the_device_and_is_compiled(n: int, k: int, tokens: int) -> None:
    form = choose_form(n, k, tokens, 132)
    assert form.tokens >= tokens
    assert form.blocks <= 132
    assert form.blocks % form.cluster == 0
    assert form.blocks // form.cluster <= form.groups(n) * SEGMENTS
    assert form.shared_bytes <= SHARED_BYTES
    assert form.defines in [one.defines for one in compiled_forms(form.tokens)]
    least = min(modelled_time(n, k, one) for one in candidates(n, 32, 132))
    assert modelled_time(n, k, form) <= least


@pytest.mark.parametrize("width", WIDTHS)
def test_shared_memory_is_that_of_the_source(width: int) -> None:
    for form in compiled_forms(width):
        nodes = form.stages * form.tokens * 256
        rings = nodes + form.warps * 2 * (form.tokens // 2 * 4 * 32)
        barriers = rings + form.warps * form.slots * form.chunk * 1152
        assert form.shared_bytes == barriers + 16 * form.stages + 16 * form.warps * form.slots
        assert 4 <= form.stages <= 8
        assert form.node_bytes == form.blocks * PLACES * form.warps * 16 * form.tokens * 4
        assert row_tiles(16 * form.warps * form.cluster) == form.warps * form.cluster


def test_tokens_beyond_the_widest_product_are_refused() -> None:
    for tokens in (0, MAX_TOKENS + 1):
        with pytest.raises(RequestError, match="tokens"):
            choose_form(64, 128, tokens, 132)
