"""Linears over unquantized weights of 16 bits on CUDA: one record per op and kernel, named `<op>_plain_<kernel>`.

    kernel        rows M   sums of a row
    small         1..32    the same at any M
    small_more    33..64   the same kernel, which reads the weights once for every 32 rows
    cublas        any      cuBLAS's own, by M

`cublas` is torch's product. It may be faster for large weights, but up to 32 rows it comes after the kernel that keeps
a row's bits; small weights (in_proj_b|a, routers) are faster there anyway. All read one matrix of the stacked parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.records import KernelRequest, KernelSpec
from vtensors_kernels.layouts import PLAIN_ROWS
from vtensors_plugins.backends.cuda_nvfp4 import NUMERICS
from vtensors_plugins.backends.cuda_requests import HALVES, fingerprint_line, refusal

if TYPE_CHECKING:
    from vtensors_formats import PlainWeight
    from vtensors_kernels.plain.matrix import PlainMatrix

Call = Callable[..., Any]
OPS = ("linear", "linears", "linear_add", "norm_linears")
SCHEMES = ("bf16", "f16")
# Pieces of K by shape alone, four and four, in order.
SUMS = "plain-pieces"
_DTYPES = dict(zip(HALVES, SCHEMES, strict=True))


def plain_kernels() -> list[KernelSpec]:
    """Every kernel of the CUDA backend for linears over plain weights."""
    return [
        *(_spec(op, "small", (1, 32)) for op in OPS),
        *(_spec(op, "small_more", (33, 64)) for op in OPS),
        *(_spec(op, "cublas", (1, None)) for op in OPS),
    ]


def _spec(op: str, kernel: str, tokens: tuple[int, int | None]) -> KernelSpec:
    small = kernel != "cublas"
    return KernelSpec(
        name=f"{op}_plain_{kernel}",
        op=op,
        schemes=SCHEMES,
        targets=("cuda",),
        numerics=NUMERICS,
        refuse=_refuse_small if small else _refuse,
        bind=_bind_small if small else _bind_cublas,
        cost=_small_cost if small else _cublas_cost,
        sums=SUMS if small else "",
        layout=PLAIN_ROWS,
        prepare=_prepare,
        tokens=tokens,
        probe=_probe if small else _probe_cublas,
        fingerprint=_fingerprint if small else _fingerprint_cublas,
    )


def _prepare(weights: Sequence[PlainWeight], _request: KernelRequest) -> PlainMatrix:
    from vtensors_kernels.plain.matrix import stack_rows

    return stack_rows(weights)


def _bind_small(matrix: PlainMatrix, request: KernelRequest) -> Call:
    import torch

    from vtensors_kernels.plain.small import SmallLinear
    from vtensors_plugins.backends.cuda_calls import over_rows

    norm = request.op.startswith("norm_")
    call = SmallLinear(matrix, getattr(torch, request.dtype), norm=norm)
    # A stacked matrix was written by a copy, and the kernel reads it before the launches before it have ended.
    torch.cuda.current_stream(matrix.rows.device).synchronize()
    if norm:
        return over_rows(lambda x, gain, eps: call(x, None, gain, eps))
    return over_rows(call)


def _bind_cublas(matrix: PlainMatrix, request: KernelRequest) -> Call:
    from vtensors_kernels.plain.cublas import plain_product
    from vtensors_plugins.backends.cuda_calls import for_op

    return for_op(request.op, plain_product(matrix))


def _small_cost(request: KernelRequest) -> float:
    from vtensors_kernels.plain.costs import small_cost

    return small_cost(request)


def _cublas_cost(request: KernelRequest) -> float:
    from vtensors_kernels.plain.costs import cublas_cost

    return cublas_cost(request)


def _probe(request: KernelRequest) -> None:
    from vtensors_kernels.plain.probe import probe_plain_small

    probe_plain_small(request)


def _probe_cublas(request: KernelRequest) -> None:
    from vtensors_kernels.plain.probe import probe_plain_cublas

    probe_plain_cublas(request)


def _fingerprint_cublas(request: KernelRequest) -> str:
    import torch

    return fingerprint_line(request, f"{request.op} torch {torch.__version__}")


def _fingerprint(request: KernelRequest) -> str:
    from vtensors_kernels.plain.probe import fingerprint_plain_small

    return fingerprint_line(request, fingerprint_plain_small(request))


# ---- why not


def _refuse(request: KernelRequest) -> str | None:
    if "pre_scale" in request.traits:
        return "a pre-scale of the activations is not applied"
    reason = refusal(request)
    if reason is None and request.scheme != _DTYPES[request.dtype]:
        return f"multiplies {request.scheme} weights with activations of their own dtype, not {request.dtype}"
    return reason


def _refuse_small(request: KernelRequest) -> str | None:
    if request.shape is not None and (request.shape[1] % 8 or not all(request.shape)):
        return f"needs K to be a multiple of 8, not {request.shape[1]}"
    if request.op.startswith("norm_") and request.dtype == "float16":
        return "a gain before the norm's scale may overflow float16"
    return _refuse(request)
