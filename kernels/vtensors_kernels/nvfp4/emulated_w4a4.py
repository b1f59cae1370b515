"""NVFP4 weights with NVFP4 activations on any device: the packed weight of 16-bit kernels and the input's quantizer.

E2M1 * E4M3 has 6 significant bits within 2^-10 .. 2688, so a quantized activation without its global scale is exact in
bfloat16 and in float16. The kernels for 16-bit activations multiply it; the global scale is in the rows' scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors_formats import NVFP4Weight
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.nvfp4.block_scaled_packing import activation_of, both_global_scales
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.quantize_activations import NVFP4Quantizer, input_quantizer
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.packed_matrix import bytes_of
from vtensors_kernels.packing import row_values

LAYOUT, PAIRED_LAYOUT = "nvfp4-packed-w4a4", "nvfp4-packed-w4a4-pairs"
# As `repack.row_scale`: packed blocks hold values / 256.
_BLOCK_FACTOR = 256.0


@attrs.frozen(kw_only=True, eq=False)
class EmulatedW4A4:
    """packed: with row scales that hold both global scales, and without the pre-scale, which comes before activation.

    pre_scale: [K] float32, multiplies x before it is quantized, or None.
    """

    packed: PackedNVFP4
    activation: FP4Activation
    pre_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.packed.nbytes + bytes_of(self.pre_scale)


def pack_emulated(weights: Sequence[NVFP4Weight], *, paired: bool = False) -> EmulatedW4A4:
    """The weights packed together as `repack.pack` does, for the activations of the first.

    Errors: those of `repack.pack` and `activation_of`.
    """
    activation = activation_of(weights)
    return with_activation(pack(weights, paired=paired), weights, activation)


def with_activation(
    packed: PackedNVFP4, weights: Sequence[NVFP4Weight], activation: FP4Activation
) -> EmulatedW4A4:
    """The packed matrix of those weights, for quantized activations."""
    scales = [both_global_scales(part) * _BLOCK_FACTOR for part in weights]
    folded = attrs.evolve(
        packed, row_scale=row_values(scales, packed.shape[0], paired=packed.paired), pre_scale=None
    )
    return EmulatedW4A4(packed=folded, activation=activation, pre_scale=packed.pre_scale)


def widening_quantizer(weight: EmulatedW4A4, dtype: torch.dtype, *, norm: bool) -> NVFP4Quantizer:
    """call(x, gain, eps) -> ([M, K] of the dtype, ...): x as the packed matrix is to be multiplied with it.

    Raises RequestError for a norm before a pre-scale, which would round twice.
    """
    return input_quantizer(
        weight.activation,
        weight.packed.shape[1],
        dtype,
        pre_scale=weight.pre_scale,
        norm=norm,
        output="widened",
    )
