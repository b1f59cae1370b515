"""Modelled microseconds of the NVFP4 kernels, by shape and number of rows M = request.tokens[0].

Fitted on an H200 to back-to-back launches in a CUDA graph over weights beyond the L2 cache. On other devices only
the order counts, which bytes decide there too. `VT_AUTOTUNE=1` measures instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from types import MappingProxyType

from vtensors.records import KernelRequest
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.nvfp4.stream_form import serves

# Bytes of a packed or stored weight: 4 bits, and a scale byte for 16.
_BYTES = 9 / 16
# Rows M -> microseconds per MB of weight that the streaming kernel reads.
_STREAM = ((1, 0.241), (8, 0.244), (16, 0.311), (17, 0.49), (32, 0.52))
# Start, first loads and last sums of a launch; and what each token adds to them, up to 16.
_STREAM_START, _STREAM_TOKEN = 2.5, 0.25
_STORED_START, _STORED_TOKEN, _STORED_PER_MB = 2.2, 0.25, 0.40
_WGMMA_START, _WGMMA_PER_MB = 10.0, 0.41
# The batch-invariant one, 17..32 rows.
_SEGMENTS_START, _SEGMENTS_PER_MB = 9.2, 0.374
# The widened rows are written and read: 2 bytes a weight each time, at 3.5 TB/s. Then cuBLAS: FLOPs a microsecond.
_WIDENING_START, _WIDENED_BYTES, _COPY_PER_MB, _FLOPS = 10.0, 4.0, 1 / 3.5, 6.5e8
# Reading NVFP4 as stored takes more instructions than the packed layout.
_STORED_WIDENING = 1.1
# A norm in front, in the kernel itself: each block does it for all tokens while the first weights are on their way.
_NORM_START, _NORM_TOKEN = 1.0, 0.05
# Launches of their own behind or before a kernel, as selection counts them for the parts.
_NORM_LAUNCH, _ARGMAX_LAUNCH = 2.5, 4.0
_PICK = 1.5
# A second copy of a weight that another op reads as stored has to be worth twice the speed.
_SECOND_COPY = 2.0


def stream_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_stream`, 1..32 rows, in as many launches as the device needs."""
    m, megabytes = request.tokens[0], _megabytes(request)
    most = m
    if request.capability is not None and request.shape is not None:
        most = max(1, serves(request.shape[1], target_of(request.capability)))
    each = min(m, most)
    launch = _STREAM_START + _STREAM_TOKEN * min(each, 16) + megabytes * _between(_STREAM, each)
    if request.op.startswith("norm_"):
        launch += _NORM_START + _NORM_TOKEN * each
    return (-(-m // most) * launch + (_PICK if request.op == "linear_argmax" else 0.0)) * _copies(request)


def wgmma_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_wgmma`, 33..64 rows."""
    return (_WGMMA_START + _WGMMA_PER_MB * _megabytes(request) + _apart(request)) * _copies(request)


def wgmma_segments_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_wgmma_segments`, 17..32 rows."""
    return (_SEGMENTS_START + _SEGMENTS_PER_MB * _megabytes(request) + _apart(request)) * _copies(request)


def packed_widening_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_packed_widening`, any number of rows."""
    return (_widening(request, 1.0) + _apart(request)) * _copies(request)


def stored_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_stored`, 1..64 rows: reads the weight once for every 32 of them."""
    m = request.tokens[0]
    reads = _STORED_PER_MB * _megabytes(request) * -(-m // 32)
    pick = _PICK if request.op == "linear_argmax" else 0.0
    return _STORED_START + _STORED_TOKEN * min(m, 16) + reads + pick


def widening_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_widening`, any number of rows."""
    return _widening(request, _STORED_WIDENING) + _apart(request)


def embedding_cost(request: KernelRequest) -> float:
    """`embedding_nvfp4`: a launch; the rows are few."""
    return _STORED_START


def _megabytes(request: KernelRequest) -> float:
    n, k = request.shape or (0, 0)
    return n * k * _BYTES / 1e6


def _copies(request: KernelRequest) -> float:
    return _SECOND_COPY if "shared" in request.traits else 1.0


def _widening(request: KernelRequest, factor: float) -> float:
    n, k = request.shape or (0, 0)
    moved = n * k * (_BYTES * factor + _WIDENED_BYTES) / 1e6
    return _WIDENING_START + moved * _COPY_PER_MB + 2.0 * request.tokens[0] * n * k / _FLOPS


def _apart(request: KernelRequest) -> float:
    """Of ops that the launcher computes around a kernel which does not."""
    if request.op.startswith("norm_"):
        return _NORM_LAUNCH
    return _ARGMAX_LAUNCH if request.op == "linear_argmax" else 0.0


def _between(points: tuple[tuple[int, float], ...], m: int) -> float:
    """The value at m on the lines through the points, the last one's beyond it."""
    index = bisect_left([at for at, _ in points], m)
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (low, first), (high, second) = points[index - 1], points[index]
    return first + (second - first) * (m - low) / (high - low)


# Kernel -> its model.
COSTS: Mapping[str, Callable[[KernelRequest], float]] = MappingProxyType(
    {
        "stream": stream_cost,
        "wgmma": wgmma_cost,
        "wgmma_segments": wgmma_segments_cost,
        "packed_widening": packed_widening_cost,
        "stored": stored_cost,
        "widening": widening_cost,
        "embedding": embedding_cost,
    }
)
