"""Linears of FP8 activations by kernels that multiply in 16 bits: the quantizer first, then a packed matrix.

E4M3 codes are exact in bfloat16 and float16, so the sums are those of an FP8 product but for their order. A stored
scale joins the rows' scales when a layer is bound, a token's multiplies its sums, both in float32 before the one
rounding. Scales of groups, and of tokens where cuBLAS multiplies, go into x first, which rounds it to 16 bits as the
reference does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats.activations import ActivationQuantizer
from vtensors_kernels.activation_quantizers.fp8 import FP8Quantizer, Scaling, Written, scaling_of
from vtensors_kernels.arguments import output_for, residual_for
from vtensors_kernels.compiling.architectures import COMPILED, RUN
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.fp8.packed import PackedFP8, Scales
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.stream_form import rules_of, shared_limit
from vtensors_kernels.nvfp4.stream_launches import EPILOGUES, PROLOGUES, StreamLaunches, stream_defines

_TOKEN_SCALE = PROLOGUES["token_scale"]
_FORMAT = Scales.ROWS.format


def _instantiations() -> Iterator[Instantiation]:
    """Scales per row with scales per token: on cards that were run every form with the longest variant, else one."""
    longest = EPILOGUES["linear_swiglu"]
    for target in COMPILED:
        rules = rules_of(target)
        for (place, rule), epilogue in product(enumerate(rules), EPILOGUES.values()):
            if epilogue != longest and (place or target not in RUN):
                continue
            if place and target not in RUN:
                continue
            defines = {**stream_defines(rule, 0, epilogue, _TOKEN_SCALE), **dict(_FORMAT.defines)}
            yield Instantiation(
                source=_FORMAT.stream[0],
                function=_FORMAT.stream[1],
                defines=defines,
                targets=(target,),
                hot=True,
                expects=("mma", "bulk_copy"),
                shared_bytes=shared_limit(target, rule.blocks_per_sm),
            )


INSTANTIATIONS = tuple(_instantiations())


@attrs.frozen(kw_only=True, eq=False)
class QuantizedInputMatrix:
    """A packed matrix and the quantizer of what it is multiplied with."""

    packed: PackedFP8 | PackedNVFP4
    activation: ActivationQuantizer

    @property
    def nbytes(self) -> int:
        """Bytes on the device; the quantizer's few are not counted."""
        return self.packed.nbytes

    def quantizer(self, dtype: torch.dtype, *, by_token: bool) -> FP8Quantizer:
        """Of x, pre-scale included. by_token: whether what multiplies scales the sums of each token."""
        kept = self.scaling is Scaling.STORED or (by_token and self.scaling is Scaling.TOKEN)
        return FP8Quantizer(
            self.activation,
            self.packed.shape[1],
            dtype,
            self.packed.blocks.device,
            Written.VALUES if kept else Written.ROUNDED,
            pre_scale=self.packed.pre_scale,
            scales=kept,
        )

    @property
    def scaling(self) -> Scaling:
        """What the activation's scales belong to."""
        return scaling_of(self.activation)

    def multiplied(self, stored: Tensor | None) -> PackedFP8 | PackedNVFP4:
        """The matrix for x as the quantizer leaves it: without pre-scale, a stored scale of x in the rows' scales."""
        row_scale = self.packed.row_scale if stored is None else self.packed.row_scale * stored
        return attrs.evolve(self.packed, pre_scale=None, row_scale=row_scale)


class QuantizedStream:
    """call(x, residual=None, out=None) -> y as `StreamLinear` without a norm, x quantized first.

    A row is the same bits at any number of tokens, place in the batch and neighbours. rows, clusters: for self-tests.
    Errors: those of `StreamLinear` and `FP8Quantizer`.
    """

    def __init__(
        self,
        matrix: QuantizedInputMatrix,
        dtype: torch.dtype,
        epilogue: str = "linear",
        *,
        rows: int | None = None,
        clusters: int | None = None,
    ) -> None:
        if epilogue not in ("linear", "linear_add", "linear_swiglu"):
            raise RequestError("no such variant", seen=epilogue)
        self.quantizer = matrix.quantizer(dtype, by_token=True)
        packed = matrix.multiplied(self.quantizer.stored)
        self._linear: StreamLinear | None = None
        self._stream: StreamLaunches | None = None
        if matrix.scaling is Scaling.TOKEN:
            variant = EPILOGUES[epilogue], _TOKEN_SCALE
            self._stream = StreamLaunches(packed, dtype, variant, rows=rows, clusters=clusters)
        else:
            self._linear = StreamLinear(packed, dtype, epilogue, rows=rows, clusters=clusters)
        n = packed.shape[0]
        self._adds = epilogue == "linear_add"
        self._columns, self._most = (n // 2 if packed.paired else n), packed.format.most_tokens

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """[M, N] of the dtype, [M, N / 2] for linear_swiglu. x: [M, K]; residual: [M, N], with linear_add."""
        quantized = self.quantizer(x)
        if self._stream is None or quantized.scale is None:
            if self._linear is None:
                raise RequestError("the quantizer gives no scales of tokens")
            return self._linear(quantized.rows, residual, out=out)
        return self._by_token(self._stream, quantized.rows, quantized.scale, residual, out)

    def _by_token(
        self, stream: StreamLaunches, rows: Tensor, scale: Tensor, residual: Tensor | None, out: Tensor | None
    ) -> Tensor:
        m = rows.shape[0]
        out = output_for(rows, (m, self._columns), stream.dtype, out)
        if m > self._most:
            raise RequestError(
                "too many tokens for this kernel", seen=str(m), accepted=f"at most {self._most}"
            )
        residual = residual_for(rows, (m, self._columns), stream.dtype, residual, wanted=self._adds)
        for first, count in stream.chunks(m):
            end = first + count
            stream.run(
                count,
                rows[first:end].data_ptr(),
                out[first:end].data_ptr(),
                0 if residual is None else residual[first:end].data_ptr(),
                0,
                scale[first:end].data_ptr(),
            )
        return out


def quantized_first(
    matrix: QuantizedInputMatrix,
    dtype: torch.dtype,
    bind: Callable[[PackedFP8 | PackedNVFP4], Callable[..., Tensor]],
) -> Callable[..., Tensor]:
    """call(x [M, K], *rest) -> what the bound kernel gives of x as the quantizer leaves it, rounded to the dtype.

    bind: a packed matrix -> its call of 16-bit activations. Errors: those of bind and `FP8Quantizer`.
    """
    quantizer = matrix.quantizer(dtype, by_token=False)
    linear = bind(matrix.multiplied(quantizer.stored))
    return lambda x, *rest: linear(quantizer(x).rows, *rest)
