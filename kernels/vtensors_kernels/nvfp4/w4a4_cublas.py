"""y = q(x) @ W.T by cuBLAS's block-scaled product of 4-bit operands, through torch: sm_100 and sm_103. Compiled, not
run: the self-test on the card decides.

x is quantized by a launch of ours, cuBLAS gives float32 sums, and a second launch of ours applies what is left:
both global scales, bias, residual or SwiGLU, with one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.arguments import output_for, residual_for
from vtensors_kernels.nvfp4.block_scaled import EPILOGUES
from vtensors_kernels.nvfp4.block_scaled_packing import activation_of, both_global_scales, stacked
from vtensors_kernels.nvfp4.finish import Finish
from vtensors_kernels.nvfp4.quantize_activations import input_quantizer, padded
from vtensors_kernels.packed_matrix import bytes_of
from vtensors_kernels.packed_tiles import TILE_ROWS
from vtensors_kernels.packing import biases, check_parts, pre_scale_of, row_values
from vtensors_kernels.reference.nvfp4_activations import tiled_scales

LAYOUT, PAIRED_LAYOUT = "nvfp4-tiled-scales", "nvfp4-tiled-scales-pairs"
TARGETS = ("sm_100a", "sm_103a")
# torch asks for whole 16-byte rows of both operands.
COLUMNS = 32


@attrs.frozen(kw_only=True, eq=False)
class TiledNVFP4:
    """One NVFP4 matrix as cuBLAS reads it. N' is N (in pairs both), padded to a multiple of 16 rows.

    codes: [N', K / 2] uint8. scales: [128 * tiles, 4 * tiles] float8_e4m3fn in tiles of 128 rows x 4. The rest as
    `BlockScaledNVFP4` has it.
    """

    codes: Tensor
    scales: Tensor
    row_scale: Tensor
    shape: tuple[int, int]
    activation: FP4Activation
    paired: bool = False
    bias: Tensor | None = None
    pre_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return bytes_of(self.codes, self.scales, self.row_scale, self.bias, self.pre_scale)


def pack_tiled(weights: Sequence[NVFP4Weight], *, paired: bool = False) -> TiledNVFP4:
    """The weights as one matrix, stacked in order, or two interleaved by 8 rows.

    Errors: those of `check_parts` and `activation_of`.
    """
    check_parts(weights, paired=paired)
    n, k = sum(part.shape[0] for part in weights), weights[0].shape[1]
    codes, scales = stacked(weights, paired=paired)
    more = padded(n, TILE_ROWS) - codes.shape[0]
    codes, scales = (torch.nn.functional.pad(part, (0, 0, 0, more)) for part in (codes, scales))
    return TiledNVFP4(
        codes=codes.contiguous(),
        scales=tiled_scales(scales.contiguous().view(torch.float8_e4m3fn)),
        row_scale=row_values([both_global_scales(part) for part in weights], n, paired=paired),
        shape=(n, k),
        activation=activation_of(weights),
        paired=paired,
        bias=biases(weights, n, paired=paired),
        pre_scale=pre_scale_of(weights),
    )


class CublasW4A4:
    """call(x, residual=None, gain=None, eps=0.0, out=None) -> y, as `BlockScaledLinear`.

    Errors: RequestError for arguments that do not fit and for a torch without 4-bit tensors; torch's own where it or
    cuBLAS has no such product on the device.
    """

    def __init__(
        self, weight: TiledNVFP4, dtype: torch.dtype, epilogue: str = "linear", *, norm: bool = False
    ) -> None:
        if epilogue not in EPILOGUES or weight.paired != (epilogue == "linear_swiglu"):
            raise RequestError(
                "the matrix is packed for another op", seen=f"{epilogue}, paired rows: {weight.paired}"
            )
        if reason := why_not_torch():
            raise RequestError(reason)
        self._quantizer = input_quantizer(
            weight.activation,
            weight.shape[1],
            dtype,
            pre_scale=weight.pre_scale,
            norm=norm,
            output="tiled",
        )
        self._weight, self._dtype, self._adds = weight, dtype, epilogue == "linear_add"
        self._matrix = weight.codes.view(torch.float4_e2m1fn_x2).t()
        n = weight.shape[0]
        self.out_features = n // 2 if weight.paired else n
        self._finish = Finish.make(dtype, self.out_features, weight.codes.device, swiglu=weight.paired)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gain: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """[M, N] of the dtype, [M, N / 2] for linear_swiglu; rounded once. Arguments as for `BlockScaledLinear`."""
        weight, m = self._weight, x.shape[0]
        codes, scales = self._quantizer(x, gain, eps)
        out = output_for(x, (m, self.out_features), self._dtype, out)
        residual = residual_for(x, (m, self.out_features), self._dtype, residual, wanted=self._adds)
        if not m:
            return out
        sums = torch._scaled_mm(
            codes.view(torch.float4_e2m1fn_x2),
            self._matrix,
            scale_a=scales.flatten(),
            scale_b=weight.scales.flatten(),
            out_dtype=torch.float32,
        )
        self._finish(
            sums,
            m,
            out.data_ptr(),
            self.out_features,
            row_scale=weight.row_scale.data_ptr(),
            bias=0 if weight.bias is None else weight.bias.data_ptr(),
            residual=0 if residual is None else residual.data_ptr(),
        )
        return out


def why_not_torch() -> str | None:
    """Why this torch has no 4-bit products, or None where it may."""
    if hasattr(torch, "float4_e2m1fn_x2") and hasattr(torch, "_scaled_mm"):
        return None
    return f"torch {torch.__version__} has no 4-bit tensors; 2.8 or newer has"
