"""x in 16 bits -> E4M3 codes and their scales, on a CUDA device; reference: the quantizers of `vtensors_formats`.

One launch for any number of rows; what a row becomes depends on nothing but that row.
"""

from __future__ import annotations

import enum
from itertools import product

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import e8m0
from vtensors_formats.activations import ActivationQuantizer, FP8StaticActivation
from vtensors_formats.dynamic_activations import (
    MX_GROUP,
    FP8GroupActivation,
    FP8TokenActivation,
    MXFP8Activation,
)
from vtensors_kernels.alignment import aligned
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, may_depend
from vtensors_kernels.dtypes import dtype_defines

SOURCE, FUNCTION = "common/quantize_fp8.cu", "quantize_fp8"
GROUP = 128
DEVICES = ("cuda",)
_THREADS, _TOKEN_THREADS, _COLUMNS = 128, 512, 8
_ARGUMENTS = 11
# Launches kept ready: decode batches. More rows build theirs.
_READY = 64
_RULES = {e8m0.ExponentRule.CEIL: 0, e8m0.ExponentRule.FLOOR: 1, e8m0.ExponentRule.FLOOR_ROUNDED: 2}


class Written(enum.Enum):
    """What becomes of x; the value is `VT_OUT` of the kernel."""

    CODES = 0
    """[M, K] float8_e4m3fn."""

    VALUES = 1
    """[M, K] in x's dtype: the codes' values without their scale, exact."""

    ROUNDED = 2
    """[M, K] in x's dtype: values times scale, rounded once: what calling the reference gives."""


class Scaling(enum.Enum):
    """What a scale belongs to; the value is `VT_SCALE` of the kernel."""

    STORED = 0
    TOKEN = 1
    GROUP = 2
    MX = 3


_FORMS = (
    *product((Scaling.STORED,), (Written.CODES, Written.VALUES)),
    *product((Scaling.TOKEN,), Written),
    *product((Scaling.GROUP, Scaling.MX), (Written.CODES, Written.ROUNDED)),
)
INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE,
        function=FUNCTION,
        defines={"VT_F16": f16, "VT_SCALE": scaling.value, "VT_OUT": written.value},
        hot=True,
    )
    for (scaling, written), f16 in product(_FORMS, (0, 1))
)


@attrs.frozen(kw_only=True, eq=False)
class QuantizedRows:
    """rows: [M, K] as `Written` says. scale: what `QuantizedActivation.scale` holds, float32 [M, 1] of tokens, [M, G]
    of groups of 128, uint8 [M, G] of 32; None where it is stored or was not asked for.
    """

    rows: Tensor
    scale: Tensor | None


class FP8Quantizer:
    """call(x) -> QuantizedRows for one layer's quantizer, K columns and dtype (bfloat16 or float16).

    pre_scale: [K] float, multiplies x first, rounded to the dtype, as in `reference.linear`.
    scales: whether the call gives them. scales_by_group: [M, G] with stride 1 from row to row, for kernels that want
    the groups apart.
    Errors: RequestError for another quantizer, K no multiple of 16 or off a CUDA device; CompileError, LaunchError.
    """

    def __init__(
        self,
        activation: ActivationQuantizer,
        k: int,
        dtype: torch.dtype,
        device: torch.device,
        written: Written = Written.CODES,
        *,
        pre_scale: Tensor | None = None,
        scales: bool = True,
        scales_by_group: bool = False,
    ) -> None:
        if device.type not in DEVICES or k % 16 or not k:
            raise RequestError(
                "activations are quantized on a CUDA device in whole sixteens of columns",
                seen=f"K = {k} on {device}",
                accepted="K a multiple of 16 on cuda",
            )
        self.scaling = scaling_of(activation)
        self.k, self.dtype, self.device, self.written = k, dtype, device, written
        self._scales, self._by_group = scales and self.scaling is not Scaling.STORED, scales_by_group
        self.stored: Tensor | None = None
        if isinstance(activation, FP8StaticActivation):
            self.stored = activation.scale.to(device=device, dtype=torch.float32).reshape(())
        self._rule = _RULES[activation.rule] if isinstance(activation, MXFP8Activation) else 0
        self._pre_scale = None if pre_scale is None else aligned(pre_scale.to(device).float(), 16)
        defines = {**dtype_defines(dtype), "VT_SCALE": self.scaling.value, "VT_OUT": written.value}
        self._function = compiled_function(SOURCE, FUNCTION, device.index or 0, defines)
        per_row = _columns_per_row(self.scaling, k) // _COLUMNS
        token = self.scaling is Scaling.TOKEN
        self._threads = _TOKEN_THREADS if token else _THREADS
        self._blocks = 1 if token else -(-per_row // _THREADS)
        self._groups = _columns_per_row(self.scaling, k) // _GROUPS.get(self.scaling, k)
        self._ready: dict[int, Launch] = {}
        # The kernel reads its scales before it waits for its predecessor, so they must be there for good.
        torch.cuda.current_stream(device).synchronize()

    def __call__(self, x: Tensor) -> QuantizedRows:
        """x: [M, K] of the dtype, any stride from row to row. Raises RequestError where it does not fit."""
        if x.dim() != 2 or x.shape[1] != self.k or x.dtype != self.dtype or x.device != self.device:
            raise RequestError(
                "the input does not fit the quantizer",
                seen=f"{x.dtype} {list(x.shape)} on {x.device}",
                accepted=f"{self.dtype} [M, {self.k}] on {self.device}",
            )
        m = x.shape[0]
        if x.stride(1) != 1 or x.data_ptr() % 16 or (m > 1 and x.stride(0) % _COLUMNS):
            x = aligned(x, 16)
        codes = self.written is Written.CODES
        rows = torch.empty(m, self.k, dtype=torch.float8_e4m3fn if codes else self.dtype, device=self.device)
        scale = self._empty_scale(m) if self._scales else None
        if not m:
            return QuantizedRows(rows=rows, scale=scale)
        self._launch_for(m).call(
            current_stream(self.device),
            x.data_ptr(),
            rows.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            0 if self.stored is None else self.stored.data_ptr(),
            0 if self._pre_scale is None else self._pre_scale.data_ptr(),
            x.stride(0),
            0 if scale is None else scale.stride(0),
            0 if scale is None else scale.stride(1),
            self.k,
            self._blocks,
            self._rule,
        )
        return QuantizedRows(rows=rows, scale=scale)

    def _empty_scale(self, m: int) -> Tensor:
        dtype = torch.uint8 if self.scaling is Scaling.MX else torch.float32
        if self._by_group:
            return torch.empty(self._groups, m, dtype=dtype, device=self.device).t()
        return torch.empty(m, self._groups, dtype=dtype, device=self.device)

    def _launch_for(self, m: int) -> Launch:
        launch = self._ready.get(m)
        if launch is None:
            launch = Launch(
                function=self._function,
                grid=(m * self._blocks, 1, 1),
                block=(self._threads, 1, 1),
                arguments=_ARGUMENTS,
                dependent=may_depend(self._function),
            )
            if m <= _READY:
                self._ready[m] = launch
        return launch


_GROUPS = {Scaling.GROUP: GROUP, Scaling.MX: MX_GROUP}


def scaling_of(activation: ActivationQuantizer) -> Scaling:
    """What the quantizer's scales belong to. Raises RequestError for one that is not FP8 or has another group."""
    match activation:
        case FP8StaticActivation():
            return Scaling.STORED
        case FP8TokenActivation():
            return Scaling.TOKEN
        case MXFP8Activation():
            return Scaling.MX
        case FP8GroupActivation(group=group) if group == GROUP:
            return Scaling.GROUP
        case _:
            raise RequestError(
                "the kernel knows no such activation quantizer",
                seen=f"{type(activation).__name__} {getattr(activation, 'group', '')}".strip(),
                accepted=f"FP8: stored scale, per token, per {GROUP} columns, MXFP8",
            )


def _columns_per_row(scaling: Scaling, k: int) -> int:
    """K up to whole groups."""
    group = _GROUPS.get(scaling, 1)
    return -(-k // group) * group
