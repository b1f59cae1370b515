"""Modelled microseconds of the FP8 and MXFP8 kernels, by shape and number of rows M = request.tokens[0].

As `nvfp4/costs.py`: of an H200, and elsewhere only the order counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from vtensors.records import KernelRequest
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.fp8.packed import SCALES_OF
from vtensors_kernels.nvfp4.stream_form import MAX_TOKENS, serves
from vtensors_kernels.packed_tiles import column_steps, row_tiles

# Microseconds per MB that the streaming kernel reads; start of a launch; what each token adds, up to 16, and each
# token beyond 8 for each MB: products and activations then take longer than the bytes.
_PER_MB, _START, _TOKEN, _TOKEN_PER_MB = 0.222, 2.5, 0.25, 0.005
_NORM_START, _NORM_TOKEN, _PICK = 1.0, 0.05, 1.5
# Products by warpgroups, 32 rows in two launches.
_SEGMENTS_START, _SEGMENTS_PER_MB = 9.2, 0.22
# The widened rows are written and read; then cuBLAS: FLOPs a microsecond.
_WIDENING_START, _WIDENED_BYTES, _COPY_PER_MB, _FLOPS = 10.0, 4.0, 1 / 3.5, 6.5e8
_NORM_LAUNCH, _ARGMAX_LAUNCH = 2.5, 4.0
# A second copy of a weight that another op reads as stored has to be worth twice the speed.
_SECOND_COPY = 2.0


def stream_cost(request: KernelRequest) -> float:
    """`linear_fp8_stream`, 1..32 rows, and `linear_fp8_stream_in_parts` beyond, in as many launches as needed."""
    m, most = request.tokens[0], MAX_TOKENS
    if request.capability is not None and request.shape is not None:
        bytes_ = SCALES_OF[request.scheme].block_bytes
        most = max(1, serves(request.shape[1], target_of(request.capability), bytes_))
    each = min(m, most)
    per_mb = _PER_MB + _TOKEN_PER_MB * max(0, each - 8)
    launch = _START + _TOKEN * min(each, 16) + per_mb * _megabytes(request)
    if request.op.startswith("norm_"):
        launch += _NORM_START + _NORM_TOKEN * each
    pick = _PICK if request.op == "linear_argmax" else 0.0
    return (-(-m // most) * launch + pick) * _copies(request)


def wgmma_segments_cost(request: KernelRequest) -> float:
    """`linear_fp8_wgmma_segments`, 17..32 rows, and `linear_fp8_wgmma_segments_in_parts` beyond."""
    launch = _SEGMENTS_START + _SEGMENTS_PER_MB * _megabytes(request)
    apart = _NORM_LAUNCH if request.op.startswith("norm_") else 0.0
    apart += _ARGMAX_LAUNCH if request.op == "linear_argmax" else 0.0
    return (-(-request.tokens[0] // MAX_TOKENS) * launch + apart) * _copies(request)


def packed_widening_cost(request: KernelRequest) -> float:
    """`linear_fp8_packed_widening`, any number of rows."""
    n, k = request.shape or (0, 0)
    moved = _megabytes(request) + n * k * _WIDENED_BYTES / 1e6
    apart = _NORM_LAUNCH if request.op.startswith("norm_") else 0.0
    apart += _ARGMAX_LAUNCH if request.op == "linear_argmax" else 0.0
    product = 2.0 * request.tokens[0] * n * k / _FLOPS
    return (_WIDENING_START + moved * _COPY_PER_MB + product + apart) * _copies(request)


def _megabytes(request: KernelRequest) -> float:
    n, k = request.shape or (0, 0)
    return row_tiles(n) * column_steps(k) * SCALES_OF[request.scheme].block_bytes / 1e6


def _copies(request: KernelRequest) -> float:
    return _SECOND_COPY if "shared" in request.traits else 1.0


# Kernel -> its model.
COSTS: Mapping[str, Callable[[KernelRequest], float]] = MappingProxyType(
    {"stream": stream_cost, "wgmma_segments": wgmma_segments_cost, "packed_widening": packed_widening_cost}
)
