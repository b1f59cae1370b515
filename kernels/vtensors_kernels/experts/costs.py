"""Modelled microseconds of the grouped experts, by shape and number of rows M = request.tokens[0].

As `nvfp4/costs.py`: of an H200, and elsewhere only the order counts.
"""

from __future__ import annotations

from vtensors.records import KernelRequest
from vtensors_kernels.fp8.packed import SCALES_OF
from vtensors_kernels.nvfp4.packed import BLOCK_BYTES
from vtensors_kernels.packed_tiles import column_steps, row_tiles

# Launches, microseconds per MB of the experts that are read, FLOPs a microsecond.
_START, _PER_MB, _FLOPS = 8.0, 0.25, 1.5e8


def experts_cost(request: KernelRequest) -> float:
    """`experts_*_grouped`, any number of rows, experts chosen evenly."""
    m, (n, k), count = request.tokens[0], request.shape or (0, 0), max(1, request.experts)
    shared = "shared_expert" in request.traits
    read = count * (1.0 - (1.0 - request.chosen / count) ** m) + shared
    products = 2.0 * m * (request.chosen + shared) * (n * k + k * n // 2)
    return _START + max(read * expert_bytes(request) / 1e6 * _PER_MB, products / _FLOPS)


def expert_bytes(request: KernelRequest) -> int:
    """Packed bytes of one expert's blocks."""
    n, k = request.shape or (0, 0)
    block = BLOCK_BYTES if request.scheme == "nvfp4" else SCALES_OF[request.scheme].block_bytes
    return (row_tiles(n) * column_steps(k) + row_tiles(k) * column_steps(n // 2)) * block
