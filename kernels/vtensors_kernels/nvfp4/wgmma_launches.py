"""The two launches of a linear by warpgroup products, x laid out for the tensor cores and then the products: which
matrices they take, how they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.alignment import aligned
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.nvfp4.staging import Norm, Staging
from vtensors_kernels.nvfp4.warpgroup_form import WarpgroupForm
from vtensors_kernels.packed_matrix import PackedMatrix
from vtensors_kernels.packed_tiles import column_steps
from vtensors_kernels.steps.rms_norm import norm_rows

EPILOGUES: Mapping[str, int] = MappingProxyType(
    {"linear": 0, "linears": 0, "linear_add": 1, "linear_swiglu": 2}
)
# silu(gate) * up laid out for the linear behind, which is of the same width of products.
STAGED_SWIGLU = 3


def product_instantiations(
    kernel: tuple[str, str], forms: Iterable[WarpgroupForm], defines: tuple[tuple[str, int], ...] = ()
) -> tuple[Instantiation, ...]:
    """The kernel (source, function) in every form, format of activations and epilogue; defines: in all of them."""
    source, function = kernel
    return tuple(
        Instantiation(
            source=source,
            function=function,
            defines={**form.defines, "VT_F16": as_float16, "VT_EPILOGUE": epilogue, **dict(defines)},
            targets=("sm_90a",),
            hot=True,
            expects=("wgmma", "bulk_copy"),
            shared_bytes=form.shared_bytes,
        )
        for form in forms
        for as_float16 in (0, 1)
        for epilogue in (0, 1, 2, STAGED_SWIGLU)
    )


def check_packed(packed: PackedMatrix, epilogue: str) -> None:
    """Raises RequestError unless products of that matrix can be made, with that end."""
    if epilogue not in EPILOGUES:
        raise RequestError("no such variant", seen=epilogue, accepted=", ".join(EPILOGUES))
    if packed.paired != (epilogue == "linear_swiglu"):
        raise RequestError("paired rows go with linear_swiglu", seen=f"{epilogue}, paired {packed.paired}")
    if packed.blocks.data_ptr() % 16 or not packed.blocks.is_contiguous():
        raise RequestError("blocks must be contiguous and aligned to 16 bytes")
    if packed.shape[1] % 16 or packed.blocks.shape[0] * packed.blocks.shape[1] >= 1 << 24:
        raise RequestError(
            "the kernel is not made for this shape", seen=str(packed.shape), accepted="K % 16 = 0"
        )


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
    staging: Staging
    multiply: Launch

    def run(
        self,
        x: Tensor,
        residual: Tensor | None,
        out: Tensor,
        workspace: Workspace,
        norm: Norm | None = None,
    ) -> None:
        """Into out, on torch's current stream. x: [M, K], any strides; norm: of x first; residual: as out, or None."""
        x, norm = self.readable(x, norm)
        residual = None if residual is None else aligned(residual, 4)
        stream = current_stream(self.packed.blocks.device)
        with workspace.turn:
            staged = workspace.staged.data_ptr()
            self.staging.call(stream, x, norm, staged)
            self.products(stream, staged, residual, out.data_ptr(), x.shape[0], workspace)

    def readable(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """What the staging is given for x [M, K] of any strides: rows it can read, normed where it cannot do that."""
        if norm is not None and not self.staging.norms(x, norm):
            x, norm = norm_rows(x, norm.gain, norm.eps), None
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.contiguous() if not x.is_contiguous() else x.clone()
        return x, norm

    def products(
        self, stream: int, staged: int, residual: Tensor | None, out: int, m: int, workspace: Workspace
    ) -> None:
        """The second launch. staged, out: addresses, of the stages of M rows and of what comes of them."""
        packed, (n, k) = self.packed, self.packed.shape
        self.multiply.call(
            stream,
            packed.blocks.data_ptr(),
            staged,
            packed.row_scale.data_ptr(),
            _address(packed.bias),
            _address(residual),
            out,
            workspace.partials.data_ptr(),
            workspace.counters.data_ptr(),
            n,
            column_steps(k),
            m,
        )


def make_launches(
    source: str, function: str, form: WarpgroupForm, packed: PackedMatrix, dtype: torch.dtype, epilogue: int
) -> WgmmaLaunches:
    """The launches of a form that fits the matrix. Errors: CompileError, LaunchError."""
    index, f16, shared = packed.blocks.device.index or 0, dtype_defines(dtype), form.shared_bytes
    defines = {**form.defines, **f16, "VT_EPILOGUE": epilogue, **dict(packed.format.defines)}
    return WgmmaLaunches(
        packed=packed,
        staging=Staging.of(packed.shape[1], form.tokens, packed.pre_scale, dtype, index),
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
