"""The two launches of a linear by warpgroup products: x permuted for the tensor cores, then the products."""

from __future__ import annotations

from threading import Lock
from typing import Protocol

import attrs
import torch
from torch import Tensor

from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.launch import Launch, current_stream
from vtensors_kernels.nvfp4.activations import dtype_defines
from vtensors_kernels.nvfp4.packed import column_steps
from vtensors_kernels.packed_matrix import PackedMatrix

PERMUTE = "sm90/permute_activations.cu"
# As many small blocks as fit beside those of a linear that is still at work.
_PERMUTE_THREADS, _PERMUTE_BLOCKS = 64, 264


class Form(Protocol):
    """What of a compile-time form the launches need."""

    @property
    def tokens(self) -> int:
        """Of a product."""

    @property
    def blocks(self) -> int:
        """Of the grid."""

    @property
    def threads(self) -> int:
        """Of a block."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    @property
    def defines(self) -> dict[str, int]:
        """Macros without format and epilogue."""


class Workspace(Protocol):
    """Memory that calls one after the other share."""

    @property
    def staged(self) -> Tensor:
        """x as the products read it."""

    @property
    def partials(self) -> Tensor:
        """Sums that blocks give each other."""

    @property
    def counters(self) -> Tensor:
        """Arrivals for each row tile."""

    @property
    def turn(self) -> Lock:
        """Held while a call's launches are made: those of two threads must not alternate on one stream."""


@attrs.frozen(kw_only=True)
class WgmmaLaunches:
    """Both launches of one form for one packed matrix."""

    packed: PackedMatrix
    permute: Launch
    multiply: Launch

    def run(self, x: Tensor, residual: Tensor | None, out: Tensor, workspace: Workspace) -> None:
        """Into out, on torch's current stream. x: [M, K], any strides; residual: as out, contiguous, or None."""
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.contiguous() if not x.is_contiguous() else x.clone()
        packed, m, (n, k) = self.packed, x.shape[0], self.packed.shape
        steps, staged = column_steps(k), workspace.staged.data_ptr()
        stream = current_stream(packed.blocks.device)
        with workspace.turn:
            self.permute.call(
                stream, x.data_ptr(), _address(packed.pre_scale), staged, x.stride(0), m, k, steps
            )
            self.multiply.call(
                stream,
                packed.blocks.data_ptr(),
                staged,
                packed.row_scale.data_ptr(),
                _address(packed.bias),
                _address(residual),
                out.data_ptr(),
                workspace.partials.data_ptr(),
                workspace.counters.data_ptr(),
                n,
                steps,
                m,
            )


def make_launches(
    source: str, function: str, form: Form, packed: PackedMatrix, dtype: torch.dtype, epilogue: int
) -> WgmmaLaunches:
    """The launches of a form that fits the matrix. Errors: CompileError, LaunchError."""
    index, f16, shared = packed.blocks.device.index or 0, dtype_defines(dtype), form.shared_bytes
    permute = compiled_function(PERMUTE, "permute_activations", index, {"VT_TOKENS": form.tokens, **f16})
    defines = {**form.defines, **f16, "VT_EPILOGUE": epilogue, **dict(packed.format.defines)}
    threads = 8 * form.tokens * column_steps(packed.shape[1])
    return WgmmaLaunches(
        packed=packed,
        permute=Launch(
            function=permute,
            grid=(min(-(-threads // _PERMUTE_THREADS), _PERMUTE_BLOCKS), 1, 1),
            block=(_PERMUTE_THREADS, 1, 1),
            arguments=7,
            dependent=True,
        ),
        multiply=Launch(
            function=compiled_function(source, function, index, defines, shared),
            grid=(form.blocks, 1, 1),
            block=(form.threads, 1, 1),
            arguments=11,
            shared_bytes=shared,
            dependent=True,
        ),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
