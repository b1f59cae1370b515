"""What is left behind the sums of cuBLAS, in one launch: scales, bias, residual or SwiGLU, rounded once."""

from __future__ import annotations

from itertools import product

import attrs
import torch
from torch import Tensor

from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream
from vtensors_kernels.dtypes import dtype_defines

SOURCE, FUNCTION = "common/finish_widened_nvfp4.cu", "finish_widened_nvfp4"
INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE,
        function=FUNCTION,
        defines={"VT_F16": f16, "VT_SWIGLU": swiglu, "VT_SUMS16": swiglu and sums16},
        hot=True,
    )
    for f16, (swiglu, sums16) in product((0, 1), ((0, 0), (1, 0), (1, 1)))
)
_THREADS, _COLUMNS_PER_THREAD = 256, 8
# Enough blocks for any device; each takes every so-many-th token.
_BLOCKS = 1024


@attrs.frozen(kw_only=True)
class Finish:
    """The launch for outputs of so many columns."""

    launch: Launch
    columns: int

    @classmethod
    def make(
        cls, dtype: torch.dtype, columns: int, device: torch.device, *, swiglu: bool, sums16: bool = False
    ) -> Finish:
        """Compiled. dtype: of outputs, bfloat16 or float16. sums16: sums are given in that dtype, else in float32.

        Errors: RequestError for another dtype; CompileError, LaunchError.
        """
        defines = {**dtype_defines(dtype), "VT_SWIGLU": int(swiglu), "VT_SUMS16": int(sums16)}
        wide = -(-columns // (_COLUMNS_PER_THREAD * _THREADS))
        launch = Launch(
            function=compiled_function(SOURCE, FUNCTION, device.index or 0, defines),
            grid=(wide, -(-_BLOCKS // wide), 1),
            block=(_THREADS, 1, 1),
            arguments=11,
        )
        return cls(launch=launch, columns=columns)

    def __call__(
        self,
        sums: Tensor,
        m: int,
        out: int,
        stride: int,
        *,
        row_scale: int = 0,
        token_scale: int = 0,
        bias: int = 0,
        residual: int = 0,
    ) -> None:
        """Into m rows of out, on torch's current stream.

        sums: [m or more, rows of the matrix], contiguous. stride: elements between rows of out and of the residual.
        out and what follows: addresses, 0 for what there is not; row_scale, token_scale, bias: float32.
        """
        vectors = stride % _COLUMNS_PER_THREAD == 0 and out % 16 == 0 and residual % 16 == 0
        self.launch.call(
            current_stream(sums.device),
            sums.data_ptr(),
            row_scale,
            token_scale,
            bias,
            residual,
            out,
            m,
            sums.shape[1],
            self.columns,
            stride,
            int(vectors),
        )
