"""y = q(x) @ W.T on block-scaled tensor cores of sm_120 and sm_121: x quantized by one launch, multiplied by a second.

A row of the result is the same bits at any number of tokens, place in the batch and neighbours. Compiled, not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.arguments import output_for, residual_for
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.nvfp4.block_scaled_packing import BlockScaledNVFP4
from vtensors_kernels.nvfp4.quantize_activations import input_quantizer
from vtensors_kernels.packed_tiles import column_steps, row_tiles

SOURCE, FUNCTION = "sm120/linear_nvfp4_w4a4.cu", "linear_nvfp4_w4a4"
TARGETS = ("sm_120a", "sm_121a")
EPILOGUES: Mapping[str, int] = MappingProxyType({"linear": 0, "linear_add": 1, "linear_swiglu": 2})
# Groups of 8 tokens that a block multiplies.
TOKEN_TILES = (1, 2, 4, 8)
_THREADS, _ARGUMENTS = 256, 9
_READY = 64


def _defines(f16: int, tiles: int, epilogue: str) -> dict[str, int]:
    return {"VT_F16": f16, "VT_TOKEN_TILES": tiles, "VT_EPILOGUE": EPILOGUES[epilogue]}


# Every form in bfloat16; float16 changes how outputs are rounded, and is compiled in the smallest.
INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE,
        function=FUNCTION,
        defines=_defines(f16, tiles, epilogue),
        targets=TARGETS,
        hot=True,
        expects=("omma",),
    )
    for f16 in (0, 1)
    for tiles in TOKEN_TILES
    for epilogue in EPILOGUES
    if not f16 or tiles == TOKEN_TILES[0]
)


class BlockScaledLinear:
    """call(x, residual=None, gain=None, eps=0.0, out=None) -> y: `linear` and `linears` (parts packed together),
    `linear_add`, `linear_swiglu` (a paired matrix), each with an RMSNorm before it where `norm` is set.

    weight: on a CUDA device of sm_120 or sm_121. dtype: bfloat16 or float16. Errors: RequestError for arguments that
    do not fit; CompileError (on any other device), LaunchError.
    """

    def __init__(
        self, weight: BlockScaledNVFP4, dtype: torch.dtype, epilogue: str = "linear", *, norm: bool = False
    ) -> None:
        if epilogue not in EPILOGUES or weight.paired != (epilogue == "linear_swiglu"):
            raise RequestError(
                "the matrix is packed for another op", seen=f"{epilogue}, paired rows: {weight.paired}"
            )
        self._quantizer = input_quantizer(
            weight.activation,
            weight.shape[1],
            dtype,
            pre_scale=weight.pre_scale,
            norm=norm,
            output="fragments",
        )
        self._weight, self._dtype, self._adds = weight, dtype, epilogue == "linear_add"
        n = weight.shape[0]
        self.out_features = n // 2 if weight.paired else n
        f16, device = dtype_defines(dtype)["VT_F16"], weight.blocks.device
        wanted = [
            Wanted(source=SOURCE, name=FUNCTION, defines=tuple(_defines(f16, tiles, epilogue).items()))
            for tiles in TOKEN_TILES
        ]
        self._functions = dict(zip(TOKEN_TILES, compile_many(wanted, device.index or 0), strict=True))
        self._launches: list[Launch | None] = [None] * _READY
        # The kernel reads weights before it waits for its predecessor, so they must be there for good.
        torch.cuda.current_stream(device).synchronize()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gain: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """[M, N] of the dtype, [M, N / 2] for linear_swiglu; rounded once. x: [M, K]; residual: [M, N].

        gain: [K] float32, and eps, with a norm. out: to write into, contiguous.
        """
        m = x.shape[0]
        fragments, _ = self._quantizer(x, gain, eps)
        out = output_for(x, (m, self.out_features), self._dtype, out)
        residual = residual_for(x, (m, self.out_features), self._dtype, residual, wanted=self._adds)
        if m:
            weight = self._weight
            self._launch(m).call(
                current_stream(x.device),
                weight.blocks.data_ptr(),
                weight.row_scale.data_ptr(),
                0 if weight.bias is None else weight.bias.data_ptr(),
                fragments.data_ptr(),
                0 if residual is None else residual.data_ptr(),
                out.data_ptr(),
                m,
                weight.shape[0],
                column_steps(weight.shape[1]),
            )
        return out

    def _launch(self, m: int) -> Launch:
        if m > _READY:
            return self._made(m)
        launch = self._launches[m - 1]
        if launch is None:
            launch = self._launches[m - 1] = self._made(m)
        return launch

    def _made(self, m: int) -> Launch:
        tiles = next((tiles for tiles in TOKEN_TILES if 8 * tiles >= m), TOKEN_TILES[-1])
        function = self._functions[tiles]
        return Launch(
            function=function,
            grid=(row_tiles(self._weight.shape[0]) * -(-m // (8 * tiles)), 1, 1),
            block=(_THREADS, 1, 1),
            arguments=_ARGUMENTS,
            dependent=may_depend(function),
        )
