"""The gather of plain embedding rows on CUDA: `embedding_plain`, for bfloat16, float16 and float32 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vtensors.records import KernelRequest, KernelSpec
from vtensors_plugins.backends.cuda_requests import fingerprint_line, refusal

if TYPE_CHECKING:
    from vtensors_formats.plain import PlainWeight

SCHEMES = ("bf16", "f16", "f32")
_SOURCE = "common/embedding_rows.cu"
# Microseconds: a launch and a row or two from memory; the reference takes three launches.
_COST = 2.5


def embedding_kernels() -> list[KernelSpec]:
    """`embedding_plain`."""
    return [
        KernelSpec(
            name="embedding_plain",
            op="embedding",
            schemes=SCHEMES,
            targets=("cuda",),
            numerics="bitwise",
            refuse=_refuse,
            bind=_bind,
            cost=_COST,
            probe=_probe,
            fingerprint=_fingerprint,
        )
    ]


def _refuse(request: KernelRequest) -> str | None:
    if request.shape is not None and (request.shape[1] % 8 or not request.shape[0]):
        return f"needs K to be a multiple of 8, not {request.shape[1]}"
    return refusal(request)


def _bind(weight: PlainWeight, _request: KernelRequest) -> Callable[..., Any]:
    from vtensors_kernels.steps.embedding_rows import bind_embedding_rows

    return bind_embedding_rows(weight)


def _probe(request: KernelRequest) -> None:
    import torch

    from vtensors.errors import RequestError
    from vtensors_kernels.steps.embedding_rows import probe_embedding_rows

    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    stored = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[request.scheme]
    probe_embedding_rows(request.shape[1], stored, getattr(torch, request.dtype), request.device)


def _fingerprint(request: KernelRequest) -> str:
    from vtensors_kernels.compiling.functions import fingerprint

    defines = {"VT_F16": int(request.dtype == "float16"), "VT_WEIGHT": SCHEMES.index(request.scheme)}
    return fingerprint_line(request, fingerprint(_SOURCE, defines, request.capability or (8, 0)))
