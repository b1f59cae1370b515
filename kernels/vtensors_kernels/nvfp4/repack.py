"""NVFP4 weights as stored -> the packed layout, on a CUDA device; reference: `reference/nvfp4_packing.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_formats.weight import Weight
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES, TILE_ROWS, PackedNVFP4, column_steps, row_tiles

SOURCE = "common/repack_nvfp4.cu"
INSTANTIATIONS = (Instantiation(source=SOURCE, function="repack_nvfp4"),)
THREADS = 256
_ROWS_PER_WARP = 8
_WARPS = THREADS // 32


def pack(weights: Sequence[NVFP4Weight], *, paired: bool = False) -> PackedNVFP4:
    """The weights as one packed matrix: stacked by rows in order, or two of one shape interleaved by 8 rows.

    weights: on one CUDA device, of one K; groups of 16 or 32, global scale or divisor, per tensor or per row,
    each as it is. A missing bias counts as zeros where another part has one.
    Errors: those of `check_parts`; RequestError off a CUDA device; CompileError, LaunchError.
    """
    check_parts(weights, paired=paired)
    device = weights[0].device
    if device.type != "cuda":
        raise RequestError("weights are repacked on a CUDA device", seen=str(device), accepted="cuda")
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    blocks = torch.empty(row_tiles(n), column_steps(k), BLOCK_BYTES, dtype=torch.uint8, device=device)
    if n % TILE_ROWS:
        blocks[-1].zero_()
    first = 0
    for part in weights:
        _launch(part, blocks, first, interleaved=paired)
        first += _ROWS_PER_WARP if paired else part.shape[0]
    return PackedNVFP4(
        blocks=blocks,
        row_scale=row_values([row_scale(part) for part in weights], n, paired=paired),
        shape=(n, k),
        paired=paired,
        bias=biases(weights, n, paired=paired),
        pre_scale=None if weights[0].pre_scale is None else weights[0].pre_scale.float().contiguous(),
    )


def check_parts(weights: Sequence[Weight], *, paired: bool) -> None:
    """Raises RequestError unless the weights can become one packed matrix.

    That is: at least one row, one device, one K, one pre_scale (or none), and for `paired` two of one shape.
    """
    if not weights or not all(part.shape[0] and part.shape[1] for part in weights):
        raise RequestError("nothing to pack", seen=str([part.shape for part in weights]))
    first = weights[0]
    if any(part.shape[1] != first.shape[1] or part.device != first.device for part in weights):
        seen = ", ".join(f"K = {part.shape[1]} on {part.device}" for part in weights)
        raise RequestError("parts of one matrix share K and device", seen=seen)
    if paired and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        seen = ", ".join(str(part.shape) for part in weights)
        raise RequestError("rows are paired from two matrices of one shape", seen=seen)
    for part in weights[1:]:
        if (part.pre_scale is None) != (first.pre_scale is None) or (
            part.pre_scale is not None
            and first.pre_scale is not None
            and not torch.equal(part.pre_scale.float(), first.pre_scale.float())
        ):
            raise RequestError(
                "parts of one matrix share the input, so they need one pre_scale",
                seen="differing pre_scale",
                fix="pack the parts one by one",
            )


def row_scale(weight: NVFP4Weight) -> Tensor:
    """[N] float32: 256 times each row's global scale; of a divisor 1 / divisor in float64, rounded once."""
    stored = weight.global_scale
    if stored is None:
        if weight.global_divisor is None:
            raise RequestError("an NVFP4 weight without a global scale")
        stored = (1.0 / weight.global_divisor.double()).float()
    return (stored.float() * 256.0).reshape(-1).expand(weight.shape[0])


def row_values(parts: Sequence[Tensor], n: int, *, paired: bool) -> Tensor:
    """[16 * ceil(N / 16)] float32: a value per row of each part, [N of it], in packed order; zeros elsewhere."""
    if not paired:
        flat = torch.cat([part.float() for part in parts])
        return torch.nn.functional.pad(flat, (0, row_tiles(n) * TILE_ROWS - n))
    padding = row_tiles(n) * 8 - parts[0].shape[0]
    halves = [torch.nn.functional.pad(part.float(), (0, padding)).reshape(-1, 8) for part in parts]
    return torch.stack(halves, dim=1).reshape(-1)


def biases(weights: Sequence[Weight], n: int, *, paired: bool) -> Tensor | None:
    """[16 * ceil(N / 16)] float32 in packed order, zeros for a part without one; None where no part has any."""
    if all(part.bias is None for part in weights):
        return None
    zeros = [torch.zeros(part.shape[0], device=part.device) for part in weights]
    filled = [zero if part.bias is None else part.bias for part, zero in zip(weights, zeros, strict=True)]
    return row_values(filled, n, paired=paired)


def aligned(tensor: Tensor, alignment: int) -> Tensor:
    """The tensor contiguous and at a multiple of alignment bytes, copied only where it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % alignment else tensor


def _launch(part: NVFP4Weight, blocks: Tensor, first: int, *, interleaved: bool) -> None:
    codes, scales = aligned(part.codes, 8), aligned(part.block_scale, 1)
    (n, k), device = part.shape, blocks.device.index or 0
    warps = -(-n // _ROWS_PER_WARP) * column_steps(k)
    launch = Launch(
        function=compiled_function(SOURCE, "repack_nvfp4", device, {}),
        grid=(-(-warps // _WARPS), 1, 1),
        block=(THREADS, 1, 1),
        arguments=8,
    )
    stream = current_stream(blocks.device)
    addresses = codes.data_ptr(), scales.data_ptr(), blocks.data_ptr()
    launch.call(stream, *addresses, n, k, first, int(interleaved), part.group)
