"""y = q(x * pre_scale) @ W.T + bias for a weight of any scheme, dequantized per use in row blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.plain import PlainWeight
from vtensors_formats.weight import BLOCK_BYTES, Weight


def linear(
    x: Tensor, weight: Weight, activation: ActivationQuantizer | None = None, *, max_bytes: int = BLOCK_BYTES
) -> Tensor:
    """[..., N] in x's dtype.

    x: [..., K] bfloat16, float16 or float32. weight: (N, K). activation: the quantizer to put x through
    (`weight.activation`, where the layer is to run as declared), or None for x as it is.
    max_bytes: how much of the weight may exist as float32 at a time.

    The pre-scale multiplies x first, in float32, then the quantizer. Products and sums are float32 and the
    result is rounded once. A plain weight of x's own dtype is multiplied as it lies, without a copy.
    """
    if weight.pre_scale is not None:
        x = (x.to(torch.float32) * weight.pre_scale.to(torch.float32)).to(x.dtype)
    if activation is not None:
        x = activation(x)
    if isinstance(weight, PlainWeight) and weight.tensor.dtype == x.dtype:
        return F.linear(x, weight.tensor, None if weight.bias is None else weight.bias.to(x.dtype))
    wide = x.to(torch.float32)
    blocks = [F.linear(wide, block) for _, _, block in weight.dequantize_blocks(max_bytes)]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)
    if weight.bias is not None:
        out = out + weight.bias.to(torch.float32)
    return out.to(x.dtype)
