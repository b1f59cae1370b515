"""FP8 and MXFP8 weights as stored -> the packed layout, on a CUDA device; reference: `reference/fp8_packing.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream
from vtensors_kernels.fp8.packed import CODE_BYTES, PackedFP8
from vtensors_kernels.fp8.scales import FP8, block_scales, row_scale, scales_of
from vtensors_kernels.nvfp4.packed import TILE_ROWS, column_steps, row_tiles
from vtensors_kernels.nvfp4.repack import aligned, biases, check_parts, row_values

SOURCE = "common/repack_fp8.cu"
INSTANTIATIONS = (Instantiation(source=SOURCE, function="repack_fp8"),)
THREADS = 256
_ROWS_PER_WARP = 8
_WARPS = THREADS // 32


def pack_fp8(weights: Sequence[FP8], *, paired: bool = False) -> PackedFP8:
    """The weights as one packed matrix: stacked by rows in order, or two of one shape interleaved by 8 rows.

    weights: on one CUDA device, of one K, a multiple of 16, all with scales of one kind: per matrix or row, per block
    (of 128 i columns and 4 j rows that begin at a multiple of 4), or E8M0 for 32 columns. A missing bias counts as
    zeros where another part has one.
    Errors: those of `check_parts`; RequestError for other scales or off a CUDA device; CompileError, LaunchError.
    """
    check_parts(weights, paired=paired)
    device = weights[0].device
    if device.type != "cuda":
        raise RequestError("weights are repacked on a CUDA device", seen=str(device), accepted="cuda")
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    if k % 16:
        raise RequestError("the packed layout needs whole groups of 16 columns", seen=f"K = {k}")
    scales = scales_of(weights)
    blocks = torch.empty(row_tiles(n), column_steps(k), scales.block_bytes, dtype=torch.uint8, device=device)
    if n % TILE_ROWS:
        blocks[-1].zero_()
    blocks[:, :, CODE_BYTES:] = block_scales(weights, paired=paired)
    first = 0
    for part in weights:
        _launch(part, blocks, first, interleaved=paired)
        first += _ROWS_PER_WARP if paired else part.shape[0]
    return PackedFP8(
        blocks=blocks,
        row_scale=row_values([row_scale(part) for part in weights], n, paired=paired),
        shape=(n, k),
        scales=scales,
        paired=paired,
        bias=biases(weights, n, paired=paired),
        pre_scale=None if weights[0].pre_scale is None else weights[0].pre_scale.float().contiguous(),
    )


def _launch(part: FP8, blocks: Tensor, first: int, *, interleaved: bool) -> None:
    codes = aligned(part.codes, 16)
    (n, k), device = part.shape, blocks.device.index or 0
    warps = -(-n // _ROWS_PER_WARP) * column_steps(k)
    launch = Launch(
        function=compiled_function(SOURCE, "repack_fp8", device, {}),
        grid=(-(-warps // _WARPS), 1, 1),
        block=(THREADS, 1, 1),
        arguments=7,
    )
    stream = current_stream(blocks.device)
    launch.call(stream, codes.data_ptr(), blocks.data_ptr(), n, k, first, int(interleaved), blocks.shape[2])
