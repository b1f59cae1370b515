"""Bytes that a prepared weight takes on its device, by layout and shape alone. Torch-free at import."""

from __future__ import annotations

from vtensors.records import KernelRequest


def prepared_bytes(layout: str, request: KernelRequest, stored: int) -> int | None:
    """What the weight of a request takes in a layout; None where the shape or the layout is not known.

    stored: bytes of the weight as the checkpoint has it, which the layout `stored` keeps.
    """
    if layout == "stored":
        return stored
    from vtensors_kernels.nvfp4.packed import TILE_ROWS, column_steps, row_tiles

    block_bytes = _block_bytes(layout, request.scheme)
    if block_bytes is None or request.shape is None:
        return None
    n, k = request.shape
    tiles = row_tiles(n)
    # A float32 scale per row, and one bias where there is any.
    per_row = 4 * (1 + ("bias" in request.traits))
    pre_scale = 4 * k if "pre_scale" in request.traits else 0
    return tiles * column_steps(k) * block_bytes + tiles * TILE_ROWS * per_row + pre_scale


def _block_bytes(layout: str, scheme: str) -> int | None:
    """Of a block of 16 x 128 in a packed layout; None for other layouts."""
    from vtensors_kernels.fp8 import packed as fp8
    from vtensors_kernels.nvfp4 import packed as nvfp4

    if layout in (nvfp4.LAYOUT, nvfp4.PAIRED_LAYOUT):
        return nvfp4.BLOCK_BYTES
    if layout in (fp8.LAYOUT, fp8.PAIRED_LAYOUT) and scheme in fp8.SCALES_OF:
        return fp8.SCALES_OF[scheme].block_bytes
    return None
