"""Rows of an embedding gathered by one launch, whatever the format of the matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.arguments import output_for
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, current_stream, may_depend
from vtensors_kernels.dtypes import HALVES, dtype_defines

THREADS = 128
# Launches kept ready: decode batches. Longer id lists build theirs.
_READY = 64


class RowGather:
    """One [V, K] matrix and its launches, by dtype of the output.

    kernel: source and function, whose parameters are ids, the stored tensors, out, V, K and the numbers. defines:
    without the dtype. shape: (V, K). stored: on one CUDA device, as the kernel wants them. columns: of a thread.
    Errors: CompileError, LaunchError.
    """

    def __init__(
        self,
        kernel: tuple[str, str],
        defines: tuple[tuple[str, int], ...],
        shape: tuple[int, int],
        stored: tuple[Tensor, ...],
        numbers: tuple[int, ...] = (),
        *,
        columns: int,
    ) -> None:
        source, name = kernel
        self._shape, self._numbers, self._columns = shape, numbers, columns
        # Kept, so that the addresses stay good.
        self._stored, self._device = stored, stored[0].device
        self._addresses = tuple(tensor.data_ptr() for tensor in stored)
        wanted = [
            Wanted(source=source, name=name, defines=(*defines, *dtype_defines(dtype).items()))
            for dtype in HALVES
        ]
        functions = compile_many(wanted, self._device.index or 0)
        self._functions = dict(zip(HALVES, functions, strict=True))
        self._ready = {
            dtype: tuple(self._launch(function, tokens) for tokens in range(1, _READY + 1))
            for dtype, function in self._functions.items()
        }

    def __call__(self, ids: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[T, K] in the dtype, bfloat16 or float16. ids: [T] int64. out: to write into. RequestError for others."""
        dtype_defines(dtype)
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.device != self._device:
            raise RequestError(
                "ids do not fit",
                seen=f"{ids.dtype} {list(ids.shape)} on {ids.device}",
                accepted=f"torch.int64 [T] on {self._device}",
            )
        ids, tokens, (rows, columns) = ids.contiguous(), ids.shape[0], self._shape
        out = output_for(ids, (tokens, columns), dtype, out)
        if not tokens:
            return out
        ready = self._ready[dtype]
        launch = ready[tokens - 1] if tokens <= _READY else self._launch(self._functions[dtype], tokens)
        stream = current_stream(ids.device)
        launch.call(stream, ids.data_ptr(), *self._addresses, out.data_ptr(), rows, columns, *self._numbers)
        return out

    def _launch(self, function: DeviceFunction, tokens: int) -> Launch:
        pieces = self._shape[1] // self._columns
        return Launch(
            function=function,
            grid=(tokens * -(-pieces // THREADS), 1, 1),
            block=(THREADS, 1, 1),
            arguments=4 + len(self._stored) + len(self._numbers),
            dependent=may_depend(function),
        )
