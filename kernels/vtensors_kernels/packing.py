"""What every packed layout is made by on a CUDA device, whatever the format of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats.weight import Weight
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.launch import Launch, current_stream
from vtensors_kernels.packed_tiles import TILE_ROWS, column_steps, row_tiles

THREADS = 256
_ROWS_PER_WARP = 8
_WARPS = THREADS // 32


def empty_blocks(n: int, k: int, block_bytes: int, device: torch.device) -> Tensor:
    """[ceil(N / 16), ceil(K / 128), block_bytes] uint8, the last tile zeros where rows do not fill it.

    Raises RequestError off a CUDA device.
    """
    if device.type != "cuda":
        raise RequestError("weights are repacked on a CUDA device", seen=str(device), accepted="cuda")
    blocks = torch.empty(row_tiles(n), column_steps(k), block_bytes, dtype=torch.uint8, device=device)
    if n % TILE_ROWS:
        blocks[-1].zero_()
    return blocks


def first_rows(weights: Sequence[Weight], *, paired: bool) -> tuple[int, ...]:
    """The packed row of each part's row 0, as `cuda/include/repack_place.cuh` counts."""
    rows = [_ROWS_PER_WARP if paired else part.shape[0] for part in weights]
    return tuple(accumulate(rows[:-1], initial=0))


def repack_part(
    kernel: tuple[str, str],
    stored: Sequence[Tensor],
    shape: tuple[int, int],
    blocks: Tensor,
    first: int,
    *,
    interleaved: bool,
    last: int,
) -> None:
    """One part into its rows of the blocks, on torch's current stream.

    kernel: source and function. stored: what it reads, aligned as it says. first, interleaved: see `first_rows`.
    last: its last argument. Errors: CompileError, LaunchError.
    """
    n, k = shape
    warps = -(-n // _ROWS_PER_WARP) * column_steps(k)
    launch = Launch(
        function=compiled_function(*kernel, blocks.device.index or 0, {}),
        grid=(-(-warps // _WARPS), 1, 1),
        block=(THREADS, 1, 1),
        arguments=len(stored) + 6,
    )
    addresses = (tensor.data_ptr() for tensor in (*stored, blocks))
    launch.call(current_stream(blocks.device), *addresses, n, k, first, int(interleaved), last)


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


def interleaved(parts: Sequence[Tensor]) -> Tensor:
    """[parts * N', ...] of parts [N, ...]: eight rows of each in turn. N' is N up to a multiple of 8, rows of zeros."""
    more = -parts[0].shape[0] % _ROWS_PER_WARP
    if more:
        parts = [torch.cat([part, part.new_zeros(more, *part.shape[1:])]) for part in parts]
    eights = [part.reshape(-1, _ROWS_PER_WARP, *part.shape[1:]) for part in parts]
    return torch.stack(eights, dim=1).flatten(0, 2)


def row_values(parts: Sequence[Tensor], n: int, *, paired: bool) -> Tensor:
    """[16 * ceil(N / 16)] float32: a value per row of each part, [N of it], in packed order; zeros elsewhere."""
    if not paired:
        flat = torch.cat([part.float() for part in parts])
        return torch.nn.functional.pad(flat, (0, row_tiles(n) * TILE_ROWS - n))
    return interleaved([part.float() for part in parts])


def biases(weights: Sequence[Weight], n: int, *, paired: bool) -> Tensor | None:
    """[16 * ceil(N / 16)] float32 in packed order, zeros for a part without one; None where no part has any."""
    if all(part.bias is None for part in weights):
        return None
    zeros = [torch.zeros(part.shape[0], device=part.device) for part in weights]
    filled = [zero if part.bias is None else part.bias for part, zero in zip(weights, zeros, strict=True)]
    return row_values(filled, n, paired=paired)


def pre_scale_of(weights: Sequence[Weight]) -> Tensor | None:
    """[K] float32, contiguous: that of the first part, since parts of one matrix have one; None where it has none."""
    stored = weights[0].pre_scale
    return None if stored is None else stored.float().contiguous()
