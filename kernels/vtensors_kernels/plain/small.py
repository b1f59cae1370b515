"""y = x @ W.T for few tokens and weights of 16 bits as stored; reference: `reference/linear.py`.

A row of the result is the same bits at any number of tokens, place in the batch and neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.alignment import aligned
from vtensors_kernels.arguments import check_residual, check_x, gain_for, output_for
from vtensors_kernels.compiling.architectures import COMPILED, target_of
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, current_stream, float_bits, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.plain.matrix import PlainMatrix
from vtensors_kernels.plain.small_form import (
    MAX_TOKENS,
    SmallForm,
    choose_small_form,
    clustered_targets,
    small_forms,
)

SOURCE, FUNCTION = "common/linear_plain_small.cu", "linear_plain_small"
# A gain before the mean is known may overflow float16: a norm goes with bfloat16 alone.
VARIANTS = ({"VT_F16": 0, "VT_NORM": 0}, {"VT_F16": 1, "VT_NORM": 0}, {"VT_F16": 0, "VT_NORM": 1})
INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE,
        function=FUNCTION,
        defines={**form.defines, **variant},
        targets=clustered_targets() if clustered else COMPILED,
        hot=True,
        expects=("mma",),
    )
    for clustered in (False, True)
    for form in small_forms(clustered)
    for variant in VARIANTS
)
_ALIGNMENT = 8  # 16-bit numbers


class SmallLinear:
    """call(x, residual=None, gain=None, eps=0.0, out=None) -> y: `linear`, `linears` (rows stacked), `linear_add`
    where a residual is given, `norm_linears` where `norm` is set.

    matrix: on a CUDA device, complete for good: it is read before the kernels launched before have ended. dtype: of
    x and of the matrix. rows: for self-tests, the forms of another N.
    Errors: RequestError for arguments that do not fit; CompileError, LaunchError.
    """

    def __init__(
        self, matrix: PlainMatrix, dtype: torch.dtype, *, norm: bool = False, rows: int | None = None
    ) -> None:
        (n, k), device = matrix.shape, matrix.rows.device
        self._defines = {**dtype_defines(dtype), "VT_NORM": int(norm)}
        if device.type != "cuda" or matrix.rows.dtype != dtype or not n or not k or k % _ALIGNMENT:
            raise RequestError(
                "the weight does not fit the kernel",
                seen=f"{matrix.rows.dtype} [{n}, {k}] on {device} for activations in {dtype}",
                accepted=f"one dtype on a CUDA device, K a multiple of {_ALIGNMENT}",
            )
        if self._defines not in VARIANTS:
            raise RequestError("no such variant", seen=f"a norm in {dtype}", accepted="a norm in bfloat16")
        self._matrix, self._dtype, self._norm = matrix, dtype, norm
        target = target_of(torch.cuda.get_device_capability(device))
        self.forms = tuple(
            choose_small_form(n if rows is None else rows, k, m, target) for m in range(1, MAX_TOKENS + 1)
        )
        different = tuple(dict.fromkeys(self.forms))
        wanted = [
            Wanted(source=SOURCE, name=FUNCTION, defines=tuple({**form.defines, **self._defines}.items()))
            for form in different
        ]
        self._functions = dict(zip(different, compile_many(wanted, device.index or 0), strict=True))
        self._launches: dict[int, Launch] = {}

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gain: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """[M, N] of the dtype, rounded once.

        x: [M, K], M at most MAX_TOKENS; rows may be apart, and are copied where they are not aligned to 16 bytes.
        residual: [M, N] of the dtype. gain: [K] float32, and eps, with a norm; a parameter, complete for good.
        out: to write into, contiguous.
        """
        (n, k), matrix = self._matrix.shape, self._matrix
        check_x(x, k=k, dtype=self._dtype)
        m = x.shape[0]
        if x.device != matrix.rows.device or m > MAX_TOKENS:
            raise RequestError(
                "the input does not fit the kernel",
                seen=f"{m} tokens on {x.device}",
                accepted=f"at most {MAX_TOKENS} on {matrix.rows.device}",
            )
        if x.stride(1) != 1 or x.stride(0) % _ALIGNMENT or x.data_ptr() % 16:
            x = aligned(x.contiguous(), 16)
        out = output_for(x, (m, n), self._dtype, out)
        if residual is not None:
            check_residual(x, (m, n), self._dtype, residual)
            residual = residual if residual.stride(1) == 1 else residual.contiguous()
        if self._norm or gain is not None:
            gain = gain_for(k, x.device, gain, wanted=self._norm)
        if m:
            self._launch(m).call(
                current_stream(x.device),
                matrix.rows.data_ptr(),
                x.data_ptr(),
                out.data_ptr(),
                0 if matrix.bias is None else matrix.bias.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                0 if gain is None else gain.data_ptr(),
                float_bits(eps),
                m,
                n,
                k,
                x.stride(0),
                0 if residual is None else residual.stride(0),
            )
        return out

    def _launch(self, m: int) -> Launch:
        """The launch for m tokens, made at their first call: nothing is compiled, so that may be in a capture."""
        found = self._launches.get(m)
        if found is None:
            form = self.forms[m - 1]
            function = self._functions[form]
            found = self._launches[m] = _launch_of(function, form, self._matrix.shape[0], m)
        return found


def _launch_of(function: DeviceFunction, form: SmallForm, n: int, m: int) -> Launch:
    return Launch(
        function=function,
        grid=form.grid(n, m),
        block=(32 * form.warps, 1, 1),
        arguments=12,
        dependent=may_depend(function),
    )
