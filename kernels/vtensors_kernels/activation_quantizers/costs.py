"""Modelled microseconds of linears with FP8 activations, by shape and number of rows M = request.tokens[0].

As `nvfp4/costs.py`: of an H200, and elsewhere only the order counts.
"""

from __future__ import annotations

from vtensors.records import KernelRequest

# The quantizer: start of a launch, and what it reads and writes in bytes a microsecond.
_QUANTIZER_START, _QUANTIZER_BYTES, _QUANTIZER_RATE = 2.0, 3.0, 3e6
# cuBLAS: start; microseconds per MB of codes; FLOPs a microsecond; what each token adds, up to 64.
_START, _PER_MB, _FLOPS, _TOKEN, _MOST_TOKENS = 3.0, 0.234, 1.2e9, 0.085, 64
# The kernel that scales float32 sums: start, bytes of a sum and its result, bytes a microsecond.
_FINISH_START, _FINISH_BYTES, _FINISH_RATE = 2.0, 10.0, 3.5e6
_NORM_LAUNCH, _ARGMAX_LAUNCH = 2.0, 4.0
_SECOND_COPY = 2.0
# From this capability on FP8 has tensor cores. A weight that is packed for 16-bit products keeps its layer from them at
# more rows than a few, where they take half the time and less: worth a quarter of what one row takes.
FP8_CAPABILITY = (8, 9)
_KEPT_FROM_FP8 = 1.25


def native_cost(request: KernelRequest) -> float:
    """`linear_fp8_w8a8` and `linear_fp8_w8a8_block`, any number of rows."""
    (n, k), m = request.shape or (0, 0), request.tokens[0]
    bytes_us, flops_us = n * k / 1e6 * _PER_MB, 2.0 * m * n * k / _FLOPS
    product = _START + max(bytes_us, flops_us) + _TOKEN * min(m, _MOST_TOKENS)
    finish = 0.0 if _by_cublas(request) else _FINISH_START + m * n * _FINISH_BYTES / _FINISH_RATE
    copied = request.op not in ("linear", "linear_add", "linear_argmax") and "shared" in request.traits
    return (_apart(request) + quantizer_cost(request) + product + finish) * (_SECOND_COPY if copied else 1.0)


def quantizer_cost(request: KernelRequest) -> float:
    """The quantizer of x."""
    k, m = (request.shape or (0, 0))[1], request.tokens[0]
    return _QUANTIZER_START + m * k * _QUANTIZER_BYTES / _QUANTIZER_RATE


def emulated_cost(request: KernelRequest, of_16_bits: float) -> float:
    """A kernel of 16-bit activations behind the quantizer. of_16_bits: what it takes by itself, without a norm."""
    norm = _NORM_LAUNCH if request.op.startswith("norm_") else 0.0
    cost = norm + quantizer_cost(request) + of_16_bits
    native = request.scheme in ("fp8-tensor", "fp8-row") and (request.capability or (0, 0)) >= FP8_CAPABILITY
    return cost * (_KEPT_FROM_FP8 if native else 1.0)


def _apart(request: KernelRequest) -> float:
    norm = _NORM_LAUNCH if request.op.startswith("norm_") else 0.0
    return norm + (_ARGMAX_LAUNCH if request.op == "linear_argmax" else 0.0)


def _by_cublas(request: KernelRequest) -> bool:
    """Whether cuBLAS applies every scale: one of each side, and nothing to add."""
    if request.op.endswith(("swiglu", "add")) or "bias" in request.traits:
        return False
    whole = request.scheme == "fp8-tensor" and "row_scale" not in request.traits
    return request.scheme == "fp8-block" or (whole and request.activations == "fp8-static")
