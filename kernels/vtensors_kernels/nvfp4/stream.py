"""y = x @ W.T for a packed matrix: the weights are streamed once for every 32 tokens, on any CUDA device.

A row of the result is the same bits at any number of tokens, place in the batch and neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.arguments import gain_for, input_source, output_for, residual_for
from vtensors_kernels.nvfp4.stored import LargestPicker
from vtensors_kernels.nvfp4.stream_form import StreamForm
from vtensors_kernels.nvfp4.stream_launches import EPILOGUES, PROLOGUES, StreamLaunches
from vtensors_kernels.packed_matrix import PackedMatrix


class StreamLinear:
    """call(x, residual=None, gain=None, eps=0.0, out=None) -> y: `linear` and `linears` (parts packed together),
    `linear_add`, `linear_swiglu` (a paired matrix), each with an RMSNorm before it where `norm` is set.

    packed: on a CUDA device. dtype: bfloat16 or float16. A pre-scale of the weight is applied, but not behind a norm:
    that would be two roundings. rows, clusters: for self-tests, the forms of another N and a grid of so many.
    Errors: RequestError for arguments that do not fit; CompileError, LaunchError.
    """

    def __init__(
        self,
        packed: PackedMatrix,
        dtype: torch.dtype,
        epilogue: str = "linear",
        prologue: str | None = None,
        *,
        rows: int | None = None,
        clusters: int | None = None,
    ) -> None:
        if epilogue not in ("linear", "linear_add", "linear_swiglu") or prologue not in (None, "norm"):
            raise RequestError("no such variant", seen=f"{epilogue}, {prologue}")
        self._adds, self._norm = epilogue == "linear_add", prologue == "norm"
        source = input_source(packed.pre_scale, norm=self._norm)
        variant = EPILOGUES[epilogue], PROLOGUES[source]
        self._stream = StreamLaunches(packed, dtype, variant, rows=rows, clusters=clusters)
        n = packed.shape[0]
        self.out_features = n // 2 if epilogue == "linear_swiglu" else n

    @property
    def forms(self) -> tuple[StreamForm, ...]:
        """The form for 1, 2, ... tokens of a launch."""
        return self._stream.forms

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gain: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """[M, N] of the dtype, [M, N / 2] for linear_swiglu; rounded once.

        x: [M, K] of the dtype, M at most the format's `most_tokens`, any strides. residual: [M, N], with linear_add.
        gain: [K] float32, and eps, with a norm; a parameter, complete for good: it may be read before the kernel
        launched before has ended. out: to write into, contiguous.
        """
        stream = self._stream
        x = stream.checked(x)
        m, columns = x.shape[0], self.out_features
        if out is None:
            out = x.new_empty(m, columns)
        else:
            output_for(x, (m, columns), stream.dtype, out)
        if self._adds or residual is not None:
            residual = residual_for(x, (m, columns), stream.dtype, residual, wanted=self._adds)
        if self._norm or gain is not None:
            gain = gain_for(stream.packed.shape[1], stream.device, gain, wanted=self._norm)
        from_x, from_residual = x.data_ptr(), 0 if residual is None else residual.data_ptr()
        from_gain, to = 0 if gain is None else gain.data_ptr(), out.data_ptr()
        if 0 < m <= stream.most:
            stream.run(m, from_x, to, from_residual, 0, from_gain, eps)
            return out
        _check_count(m, stream.packed.format.most_tokens)
        for first, count in stream.chunks(m):
            offset = 2 * first * columns
            stream.run(
                count,
                from_x + 2 * first * x.shape[1],
                to + offset,
                from_residual + offset if from_residual else 0,
                0,
                from_gain,
                eps,
            )
        return out


class StreamArgmax:
    """call(x [M, K], out=None) -> [M] int64: the row of the largest y after rounding to the dtype.

    The lowest row among equals, 0 and -0 counting as equal. Otherwise as `StreamLinear`.
    """

    def __init__(
        self,
        packed: PackedMatrix,
        dtype: torch.dtype,
        *,
        rows: int | None = None,
        clusters: int | None = None,
    ) -> None:
        source = input_source(packed.pre_scale, norm=False)
        variant = EPILOGUES["linear_argmax"], PROLOGUES[source]
        self._stream = StreamLaunches(packed, dtype, variant, rows=rows, clusters=clusters)
        self._pick = LargestPicker(packed.blocks.device, self._stream.most)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[M] int64."""
        stream, x = self._stream, self._stream.checked(x)
        m = x.shape[0]
        ids = output_for(x, (m,), torch.int64, out)
        _check_count(m, stream.packed.format.most_tokens)
        for first, count in stream.chunks(m):
            keys = torch.empty(count, stream.keys(count), dtype=torch.int64, device=x.device)
            self.run(x[first : first + count], keys, ids[first : first + count])
        return ids

    def empty_keys(self, m: int) -> Tensor:
        """Memory for the keys of m tokens of one launch, not initialized."""
        return torch.empty(m, self._stream.keys(m), dtype=torch.int64, device=self._stream.device)

    def run(self, x: Tensor, keys: Tensor, ids: Tensor) -> None:
        """Fills keys (`empty_keys`) and ids [M] for as many tokens as one launch takes."""
        self._stream.run(x.shape[0], x.data_ptr(), 0, 0, keys.data_ptr())
        self._pick(keys, ids)


def _check_count(m: int, most: int) -> None:
    if m > most:
        raise RequestError("too many tokens for this kernel", seen=str(m), accepted=f"at most {most}")
