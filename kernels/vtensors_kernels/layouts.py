"""Bytes that a prepared weight takes on its device, by layout and shape alone. Torch-free at import."""

from __future__ import annotations

from vtensors.records import KernelRequest


def prepared_bytes(layout: str, request: KernelRequest, stored: int) -> int | None:
    """What the weight of a request takes in a layout; None where the shape or the layout is not known.

    stored: bytes of the weight as the checkpoint has it, which the layout `stored` keeps.
    """
    if layout == "stored":
        return stored
    from vtensors_kernels.nvfp4.packed import (
        BLOCK_BYTES,
        LAYOUT,
        PAIRED_LAYOUT,
        TILE_ROWS,
        column_steps,
        row_tiles,
    )

    if layout not in (LAYOUT, PAIRED_LAYOUT) or request.shape is None:
        return None
    n, k = request.shape
    tiles = row_tiles(n)
    # A float32 global scale per row, and one bias where there is any.
    per_row = 4 * (1 + ("bias" in request.traits))
    pre_scale = 4 * k if "pre_scale" in request.traits else 0
    return tiles * column_steps(k) * BLOCK_BYTES + tiles * TILE_ROWS * per_row + pre_scale
