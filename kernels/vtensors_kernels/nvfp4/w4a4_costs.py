"""Modelled microseconds of the kernels with NVFP4 activations, by shape and number of rows M = request.tokens[0].

The launch that quantizes was fitted to nothing yet: 2 us and what it reads and writes. The emulated kernels cost it and
what the kernel for 16-bit activations does (`costs`). Native ones read a weight as fast as those; they come first where
they exist, since one copy of the weight serves few rows and many, and many are what 4-bit tensor cores are for.
"""

from __future__ import annotations

from vtensors.records import KernelRequest
from vtensors_kernels.nvfp4 import costs
from vtensors_kernels.nvfp4.w4a4_requests import sixteen_bits

# A launch that quantizes; each token's reading and writing.
_QUANTIZER_START, _QUANTIZER_TOKEN = 2.0, 0.02
_BYTES = 9 / 16
# Native: start, microseconds per MB of weight, and how much of that reading it again from the L2 cache costs.
_NATIVE_START, _NATIVE_PER_MB, _AGAIN = 2.0, 0.23, 0.25
_NATIVE_TOKENS = 64
# cuBLAS and the launch that applies scales; FLOPs a microsecond of 4-bit products.
_CUBLAS_START, _FLOPS = 2.0, 4e9


def quantizer_cost(request: KernelRequest) -> float:
    """The launch that quantizes x."""
    return _QUANTIZER_START + _QUANTIZER_TOKEN * request.tokens[0]


def emulated_cost(kernel: str, request: KernelRequest) -> float:
    """The quantizer's launch and the kernel for 16-bit activations, without a norm: that is the quantizer's."""
    return quantizer_cost(request) + costs.COSTS[kernel](sixteen_bits(request))


def block_scaled_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_w4a4`: the weight once for every 64 rows, all but the first time from the L2 cache."""
    times = -(-request.tokens[0] // _NATIVE_TOKENS)
    reads = _NATIVE_PER_MB * _megabytes(request) * (1 + _AGAIN * (times - 1))
    return quantizer_cost(request) + _NATIVE_START + reads


def cublas_cost(request: KernelRequest) -> float:
    """`linear_nvfp4_w4a4_cublas`."""
    n, k = request.shape or (0, 0)
    products = 2.0 * request.tokens[0] * n * k / _FLOPS
    return quantizer_cost(request) + _CUBLAS_START + max(_NATIVE_PER_MB * _megabytes(request), products)


def _megabytes(request: KernelRequest) -> float:
    n, k = request.shape or (0, 0)
    return n * k * _BYTES / 1e6
