"""Rows of a plain embedding matrix, gathered by one kernel; reference: `reference/embedding.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors_formats.plain import PlainWeight
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, current_stream
from vtensors_kernels.nvfp4.activations import HALVES, dtype_defines, may_depend, output_for
from vtensors_kernels.nvfp4.repack import aligned
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.steps.rows import device_of

SOURCE, FUNCTION = "common/embedding_rows.cu", "embedding_rows"
THREADS = 128
COLUMNS_PER_THREAD = 8
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# Launches kept ready: decode batches. Longer id lists build theirs.
_READY = 64

INSTANTIATIONS = tuple(
    Instantiation(source=SOURCE, function=FUNCTION, defines={"VT_F16": f16, "VT_WEIGHT": kind}, hot=True)
    for f16, kind in product((0, 1), _KINDS.values())
)


def bind_embedding_rows(weight: PlainWeight) -> Callable[..., Tensor]:
    """call(ids [T] int64, dtype, out=None) -> [T, K] in dtype: rows of the [V, K] weight, bit for bit the reference's.

    weight: on a CUDA device, K a multiple of 8. dtype: bfloat16 or float16. An id outside 0..V-1 gives a row of NaN,
    since a kernel cannot raise. Errors: RequestError for others; CompileError, LaunchError.
    """
    return _EmbeddingRows(weight).call


class _EmbeddingRows:
    """One weight and its launches, by dtype."""

    def __init__(self, weight: PlainWeight) -> None:
        tensor = weight.tensor
        if tensor.dim() != 2 or not tensor.numel() or tensor.shape[1] % 8:
            raise RequestError(
                "rows cannot be gathered", seen=str(list(tensor.shape)), accepted="[V, K], K a multiple of 8"
            )
        self._device = device_of(tensor.device)
        self._weight = aligned(tensor, 16)
        wanted = [
            Wanted(
                source=SOURCE,
                name=FUNCTION,
                defines=(*dtype_defines(dtype).items(), ("VT_WEIGHT", _KINDS[tensor.dtype])),
            )
            for dtype in HALVES
        ]
        functions = compile_many(wanted, self._device.index or 0)
        self._functions = dict(zip(HALVES, functions, strict=True))
        self._ready = {
            dtype: tuple(self._launch(function, tokens) for tokens in range(1, _READY + 1))
            for dtype, function in self._functions.items()
        }

    def call(self, ids: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[T, K] in the dtype."""
        dtype_defines(dtype)
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.device != self._device:
            raise RequestError(
                "ids do not fit",
                seen=f"{ids.dtype} {list(ids.shape)} on {ids.device}",
                accepted=f"torch.int64 [T] on {self._device}",
            )
        ids, tokens, (rows, columns) = ids.contiguous(), ids.shape[0], self._weight.shape
        out = output_for(ids, (tokens, columns), dtype, out)
        if not tokens:
            return out
        ready = self._ready[dtype]
        launch = ready[tokens - 1] if tokens <= _READY else self._launch(self._functions[dtype], tokens)
        launch.call(
            current_stream(ids.device),
            ids.data_ptr(),
            self._weight.data_ptr(),
            out.data_ptr(),
            rows,
            columns,
        )
        return out

    def _launch(self, function: DeviceFunction, tokens: int) -> Launch:
        pieces = self._weight.shape[1] // COLUMNS_PER_THREAD
        return Launch(
            function=function,
            grid=(tokens * -(-pieces // THREADS), 1, 1),
            block=(THREADS, 1, 1),
            arguments=5,
            dependent=may_depend(function),
        )


def probe_embedding_rows(
    columns: int, stored: torch.dtype, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Raises VtensorsError where gathered rows of K columns differ from the reference's; repeats, first and last row.

    stored: of the weight. dtype: of the output.
    """
    rows = 43
    angles = torch.linspace(-3, 3, rows * columns, dtype=torch.float64) * 1e4
    weight = PlainWeight(tensor=(angles.cos() * 3).reshape(rows, columns).to(stored).to(device))
    ids = torch.tensor([0, rows - 1, 3, 3, rows // 2], device=device)
    out = torch.full((5, columns), float("nan"), dtype=dtype, device=device)
    ours = bind_embedding_rows(weight)(ids, dtype, out=out)
    if not torch.equal(ours, embedding(ids, weight, dtype)):
        raise VtensorsError("the self-test failed: gathered rows differ")
