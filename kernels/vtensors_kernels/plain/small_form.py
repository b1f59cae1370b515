"""Compile-time forms of the kernel `linear_plain_small` and which one serves a shape; needs neither torch nor a GPU.

How a row is summed is decided by the shape alone, so that M may choose among the forms of a shape.
"""

from __future__ import annotations

import attrs

MAX_TOKENS = 64  # of a bound kernel; more would read the weights again and again
_CLUSTERED = ("sm_90a",)
# Rows from which a block takes 32 of them: enough for every SM of a large GPU, and x is read a quarter as often.
_MANY_ROWS = 4096
# Rows of so few tiles that each tile may have four SMs; and so many columns that one SM would take longer to read them
# than four blocks to meet: of very few rows, or with the activations of nine tokens; and of others.
_CLUSTER_ROWS, _VERY_FEW_ROWS, _CLUSTER_TOKENS = 528, 128, 9
_COLUMNS, _COLUMNS_OF_FEW = 1024, 4096


@attrs.frozen
class SmallForm:
    """warps: of a block. cluster: blocks that share a tile. token_groups: of 8 tokens. row_tiles: of 8 rows."""

    warps: int
    cluster: int
    token_groups: int
    row_tiles: int

    @property
    def defines(self) -> dict[str, int]:
        """The macros of `linear_plain_small.cu`, without dtype and norm."""
        return {
            "VT_WARPS": self.warps,
            "VT_CLUSTER": self.cluster,
            "VT_TOKEN_GROUPS": self.token_groups,
            "VT_ROW_TILES": self.row_tiles,
        }

    @property
    def pieces(self) -> int:
        """Parts of K that are summed apart: forms of as many give the same bits."""
        return self.warps * self.cluster

    def grid(self, n: int, m: int) -> tuple[int, int, int]:
        """Blocks for m tokens and n rows."""
        return -(-n // (8 * self.row_tiles)) * self.cluster, -(-m // (8 * self.token_groups)), 1


def choose_small_form(n: int, k: int, m: int, target: str) -> SmallForm:
    """The form for m tokens and an n x k matrix on a device of that target (`sm_90a`, `compute_80`, ...)."""
    token_groups = 1 if m <= 8 else 2 if m <= 16 else 4
    if n >= _MANY_ROWS:
        return SmallForm(8, 1, token_groups, 4)
    least = _COLUMNS if n <= _VERY_FEW_ROWS or m >= _CLUSTER_TOKENS else _COLUMNS_OF_FEW
    together = n <= _CLUSTER_ROWS and k >= least and target in _CLUSTERED
    warps, cluster = (4, 4) if together else (16, 1)
    return SmallForm(warps, cluster, token_groups, 1)


def small_forms(clustered: bool) -> tuple[SmallForm, ...]:
    """Every form: those with clusters, or those without."""
    layouts = ((4, 4, 1),) if clustered else ((16, 1, 1), (8, 1, 4))
    return tuple(
        SmallForm(warps, cluster, token_groups, rows)
        for warps, cluster, rows in layouts
        for token_groups in (1, 2, 4)
    )


def clustered_targets() -> tuple[str, ...]:
    """Targets that have the forms with clusters."""
    return _CLUSTERED
