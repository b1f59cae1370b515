"""Blocks of 16 rows and 128 columns, which every packed layout is made of: how many a matrix has."""

from __future__ import annotations

TILE_ROWS = 16
STEP_COLUMNS = 128


def row_tiles(n: int) -> int:
    """Row tiles of a matrix of n rows."""
    return -(-n // TILE_ROWS)


def column_steps(k: int) -> int:
    """Column steps of a matrix of k columns."""
    return -(-k // STEP_COLUMNS)
