"""What each compile-time form of a linear by warpgroup products fixes; needs no GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import attrs

from vtensors_kernels.packed_tiles import STEP_COLUMNS, row_tiles

# Dynamic shared memory of a block on sm_90 (CUDA programming guide, compute capability 9.0): 227 KB.
SHARED_BYTES = 227 << 10
# Of a stage's two barriers.
_BARRIER_BYTES = 16


@attrs.frozen(kw_only=True)
class WarpgroupForm(ABC):
    """One compiled form and its grid; `cuda/include/warpgroup_form.cuh` is the same in the source.

    tokens: of a product, which the kernel computes whatever M is. warpgroups: of 64 rows each, in a block. cluster:
    blocks that share x. blocks: of the grid. chunk: column steps of a weight copy. slots: such copies of a warp.
    depth: words whose products are in flight. most_stages: of x.
    """

    most_stages: ClassVar[int]

    tokens: int
    warpgroups: int
    cluster: int
    blocks: int
    chunk: int
    slots: int
    depth: int = 2

    @property
    def defines(self) -> dict[str, int]:
        """The macros of the source, without format and epilogue."""
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
        return min(self.most_stages, (SHARED_BYTES - self.other_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, by the formula of the source's `Layout`."""
        return self.stages * self._stage_bytes + self.other_bytes

    @property
    @abstractmethod
    def other_bytes(self) -> int:
        """Shared memory of all but the stages of x."""

    @property
    def _stage_bytes(self) -> int:
        return self.tokens * STEP_COLUMNS * 2 + _BARRIER_BYTES

    def groups(self, n: int) -> int:
        """Row groups of a matrix of n rows: what a cluster computes at a time."""
        return -(-row_tiles(n) // (self.warps * self.cluster))

    def with_clusters(self, most: int) -> Self:
        """The same compiled form with no more clusters than that."""
        return attrs.evolve(self, blocks=min(self.blocks // self.cluster, most) * self.cluster)
