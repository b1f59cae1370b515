"""Bytes that a prepared weight takes on its device, by layout and shape alone. Torch-free at import."""

from __future__ import annotations

from vtensors.records import KernelRequest

# Rows of 16 bits as stored, those of several parts below each other (`plain/matrix.py`).
PLAIN_ROWS = "plain-rows"
# FP8 codes as stored, those of several parts below each other (`fp8/stacked.py`).
STACKED, STACKED_PAIRS = "fp8-stacked", "fp8-stacked-pairs"

# NVFP4 for 4-bit activations, in blocks of the size of those for 16-bit ones; and with scales in tiles of 128 x 4.
W4A4 = ("nvfp4-packed-w4a4", "nvfp4-packed-w4a4-pairs", "nvfp4-block-scaled", "nvfp4-block-scaled-pairs")
TILED, TILED_PAIRS = "nvfp4-tiled-scales", "nvfp4-tiled-scales-pairs"


def prepared_bytes(layout: str, request: KernelRequest, stored: int) -> int | None:
    """What the weight of a request takes in a layout; None where the shape or the layout is not known.

    stored: bytes of the weight as the checkpoint has it, which the layout `stored` keeps.
    """
    if layout == "stored":
        return stored
    from vtensors_kernels.packed_tiles import TILE_ROWS, column_steps, row_tiles

    block_bytes = _block_bytes(layout, request.scheme)
    if request.shape is None:
        return None
    n, k = request.shape
    if layout == PLAIN_ROWS:
        return 2 * n * k + 4 * n * ("bias" in request.traits)
    if layout in (STACKED, STACKED_PAIRS):
        return _stacked_bytes(request, n, k)
    if layout in (TILED, TILED_PAIRS):
        return _tiled_bytes(request, n, k)
    if request.op == "experts":
        return _experts_bytes(layout, request)
    if block_bytes is None:
        return None
    tiles = row_tiles(n)
    # A float32 scale per row, and one bias where there is any.
    per_row = 4 * (1 + ("bias" in request.traits))
    pre_scale = 4 * k if "pre_scale" in request.traits else 0
    return tiles * column_steps(k) * block_bytes + tiles * TILE_ROWS * per_row + pre_scale


def _experts_bytes(layout: str, request: KernelRequest) -> int | None:
    """Blocks of every expert and a float32 scale per row."""
    from vtensors_kernels.experts.costs import expert_bytes
    from vtensors_kernels.experts.packed import FP8_LAYOUT, NVFP4_LAYOUT

    if layout not in (NVFP4_LAYOUT, FP8_LAYOUT):
        return None
    n, k = request.shape or (0, 0)
    return (request.experts + ("shared_expert" in request.traits)) * (expert_bytes(request) + 4 * (n + k))


def _stacked_bytes(request: KernelRequest, n: int, k: int) -> int:
    """Codes and float32 scales of rows or of blocks, bias and pre-scale."""
    scales = -(-n // 128) * -(-k // 128) if request.scheme == "fp8-block" else n
    return n * k + 4 * (scales + n * ("bias" in request.traits) + k * ("pre_scale" in request.traits))


def _tiled_bytes(request: KernelRequest, n: int, k: int) -> int:
    """Codes of whole row tiles, scales of whole tiles; float32 scale and bias of each row, pre-scale."""
    rows = -(-n // 16) * 16
    scales = -(-rows // 128) * 128 * (-(-k // 64) * 4)
    per_row = 4 * (1 + ("bias" in request.traits))
    return rows * k // 2 + scales + rows * per_row + 4 * k * ("pre_scale" in request.traits)


def _block_bytes(layout: str, scheme: str) -> int | None:
    """Of a block of 16 x 128 in a packed layout; None for other layouts."""
    from vtensors_kernels.fp8 import packed as fp8
    from vtensors_kernels.nvfp4 import packed as nvfp4

    if layout in (nvfp4.LAYOUT, nvfp4.PAIRED_LAYOUT, *W4A4):
        return nvfp4.BLOCK_BYTES
    if layout in (fp8.LAYOUT, fp8.PAIRED_LAYOUT) and scheme in fp8.SCALES_OF:
        return fp8.SCALES_OF[scheme].block_bytes
    return None
