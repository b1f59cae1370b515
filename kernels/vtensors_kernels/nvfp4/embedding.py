"""Rows of a quantised embedding, gathered and dequantised by one kernel; reference: `reference/embedding.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, current_stream
from vtensors_kernels.nvfp4.activations import HALVES, dtype_defines, may_depend, output_for
from vtensors_kernels.nvfp4.repack import aligned

SOURCE = "common/embedding_nvfp4.cu"
INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE, function="embedding_nvfp4", defines={"VT_F16": f16, "VT_DIVISOR": divisor}, hot=True
    )
    for f16, divisor in product((0, 1), (0, 1))
)
THREADS = 128
_COLUMNS_PER_THREAD = 16
# Launches kept ready: decode batches. Longer id lists build theirs.
_READY = 64


def bind_embedding(weight: NVFP4Weight) -> Callable[..., Tensor]:
    """call(ids [T] int64, dtype, out=None) -> [T, K] in dtype: rows of the [V, K] weight, bit for bit the reference's.

    weight: on a CUDA device. dtype: bfloat16 or float16. An id outside 0..V-1 gives a row of NaN, since a kernel
    cannot raise. Errors: RequestError for other ids or dtype; CompileError, LaunchError.
    """
    return _Embedding(weight).call


class _Embedding:
    """One weight and its launches, by dtype."""

    def __init__(self, weight: NVFP4Weight) -> None:
        if weight.device.type != "cuda" or not all(weight.shape):
            raise RequestError(
                "rows are gathered on a CUDA device", seen=f"{weight.shape} on {weight.device}"
            )
        stored = weight.global_scale if weight.global_scale is not None else weight.global_divisor
        if stored is None:
            raise RequestError("an NVFP4 weight without a global scale")
        self._codes, self._scales = aligned(weight.codes, 8), weight.block_scale.contiguous()
        self._global, self._per_row = stored.contiguous(), int(stored.numel() > 1)
        self._shape, self._group = weight.shape, weight.group
        divisor = int(weight.global_scale is None)
        wanted = [
            Wanted(
                source=SOURCE,
                name="embedding_nvfp4",
                defines=(("VT_DIVISOR", divisor), *dtype_defines(dtype).items()),
            )
            for dtype in HALVES
        ]
        functions = compile_many(wanted, weight.device.index or 0)
        self._functions = dict(zip(HALVES, functions, strict=True))
        self._ready = {
            dtype: tuple(self._launch(function, tokens) for tokens in range(1, _READY + 1))
            for dtype, function in self._functions.items()
        }

    def call(self, ids: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[T, K] in the dtype."""
        dtype_defines(dtype)
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.device != self._codes.device:
            raise RequestError(
                "ids do not fit",
                seen=f"{ids.dtype} {list(ids.shape)} on {ids.device}",
                accepted=f"torch.int64 [T] on {self._codes.device}",
            )
        ids, tokens, (rows, columns) = ids.contiguous(), ids.shape[0], self._shape
        out = output_for(ids, (tokens, columns), dtype, out)
        if not tokens:
            return out
        ready = self._ready[dtype]
        launch = ready[tokens - 1] if tokens <= _READY else self._launch(self._functions[dtype], tokens)
        launch.call(
            current_stream(ids.device),
            ids.data_ptr(),
            self._codes.data_ptr(),
            self._scales.data_ptr(),
            self._global.data_ptr(),
            out.data_ptr(),
            rows,
            columns,
            self._group,
            self._per_row,
        )
        return out

    def _launch(self, function: DeviceFunction, tokens: int) -> Launch:
        pieces = self._shape[1] // _COLUMNS_PER_THREAD
        return Launch(
            function=function,
            grid=(tokens * -(-pieces // THREADS), 1, 1),
            block=(THREADS, 1, 1),
            arguments=9,
            dependent=may_depend(function),
        )
