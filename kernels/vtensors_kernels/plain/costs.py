"""Modelled microseconds of linears over 16-bit weights as stored, by shape and number of rows M = request.tokens[0].

As `nvfp4/costs.py`: of an H200, and elsewhere only the order counts.
"""

from __future__ import annotations

from vtensors.records import KernelRequest
from vtensors_kernels.plain.small_form import SmallForm, choose_small_form

# Start of a launch; a megabyte into one SM, and from memory into all of them; what four blocks need to meet.
_START, _PER_SM, _PER_MB, _MEET = 1.6, 10.0, 0.24, 0.1
_SMS, _NORM, _NORM_TOKEN = 132, 0.3, 0.02
# Beyond 8 tokens x is read about as often as the weights are; a second turn of tokens reads the weights again.
_TOKEN_PER_MB = 0.005
# cuBLAS: start, bytes, FLOPs a microsecond; a norm before it.
_CUBLAS_START, _CUBLAS_PER_MB, _FLOPS, _NORM_LAUNCH, _ADD = 5.0, 0.228, 6.5e8, 2.5, 0.2
# It promises nothing of a row's bits. Where such a promise is kept, it is worth more than any time saved.
_PROMISED_ROWS, _UNPROMISED = 32, 1e5


def small_cost(request: KernelRequest) -> float:
    """`linear_plain_small`, 1..64 rows."""
    (n, k), m = request.shape or (0, 0), request.tokens[0]
    form = choose_small_form(n, k, m, "sm_90a")
    columns, _, _ = form.grid(n, m)
    turns = -(-m // (8 * form.token_groups))
    rounds = -(-columns * turns // _SMS)
    into_one = rounds * k / form.cluster * (8 * form.row_tiles + min(m, 8 * form.token_groups)) * 2 / 1e6
    of_all = turns * n * k * 2 / 1e6 * (_PER_MB + _TOKEN_PER_MB * max(0, min(m, 32) - 8))
    return _START + max(_streams(form) * into_one, of_all) + _extras(request, form, m)


def cublas_cost(request: KernelRequest) -> float:
    """torch's own product, any number of rows."""
    (n, k), m = request.shape or (0, 0), request.tokens[0]
    norm = _NORM_LAUNCH if request.op.startswith("norm_") else 0.0
    work = max(n * k * 2 / 1e6 * _CUBLAS_PER_MB, 2.0 * m * n * k / _FLOPS)
    return _CUBLAS_START + work + norm + (_UNPROMISED if m <= _PROMISED_ROWS else 0.0)


def _streams(form: SmallForm) -> float:
    """Microseconds a megabyte; the form of many rows is bound by the memory instead."""
    return _PER_SM if form.row_tiles == 1 else 0.0


def _extras(request: KernelRequest, form: SmallForm, m: int) -> float:
    norm = _NORM + _NORM_TOKEN * m if request.op.startswith("norm_") else 0.0
    return norm + (_MEET if form.cluster > 1 else 0.0) + (_ADD if request.op == "linear_add" else 0.0)
