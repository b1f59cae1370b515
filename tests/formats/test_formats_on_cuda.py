"""The reference gives the same bits on a CUDA device as on the CPU."""

from __future__ import annotations

import pytest
import torch

from vtensors.errors import WeightValueError
from vtensors_formats.activations import ActivationQuantizer, FP4Activation, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_formats.e8m0 import ExponentRule
from vtensors_formats.fp8_quantize import quantize_fp8_block, quantize_fp8_row, quantize_fp8_tensor
from vtensors_formats.mxfp8 import quantize_mxfp8
from vtensors_formats.nvfp4 import NVFP4Weight, quantize_nvfp4
from vtensors_formats.weight import Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

QUANTIZERS: list[ActivationQuantizer] = [
    FP4Activation(global_scale=torch.tensor(0.0011)),
    FP4Activation(global_divisor=torch.tensor(900.7)),
    FP8StaticActivation(scale=torch.tensor(0.0103)),
    FP8TokenActivation(),
    FP8GroupActivation(),
    *[MXFP8Activation(rule=rule) for rule in ExponentRule],
]


def spread(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 4 - 3)


def stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


def divided(values: torch.Tensor) -> NVFP4Weight:
    made = quantize_nvfp4(values)
    divisor = torch.full((values.shape[0], 1), 3584.7, device=values.device)
    return NVFP4Weight(codes=made.codes, block_scale=made.block_scale, global_divisor=divisor)


@pytest.mark.parametrize(
    "encode",
    [quantize_nvfp4, divided, quantize_mxfp8, quantize_fp8_tensor, quantize_fp8_row, quantize_fp8_block],
    ids=lambda encode: str(encode.__name__),
)
def test_weights_are_encoded_checked_and_dequantized_alike(encode: object) -> None:
    assert callable(encode)
    here: Weight = encode(spread(300, 320))
    there: Weight = encode(spread(300, 320).cuda())
    for ours, theirs in zip(here.stored(), there.stored(), strict=True):
        assert torch.equal(stored_bytes(ours), stored_bytes(theirs))
    there.check_values({})
    assert torch.equal(there.dequantize().cpu(), here.dequantize())
    assert torch.equal(here.to("cuda").rows(77, 201).dequantize().cpu(), here.dequantize()[77:201])


@pytest.mark.parametrize("number", [0.0, torch.inf])
def test_bad_scales_are_found_on_the_device(number: float) -> None:
    made = quantize_nvfp4(spread(4, 32).cuda())
    scale = torch.tensor(number, device="cuda")
    weight = NVFP4Weight(codes=made.codes, block_scale=made.block_scale, global_scale=scale)
    with pytest.raises(WeightValueError, match="global_scale"):
        weight.check_values({})


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda quantizer: type(quantizer).__name__)
def test_activations_are_quantized_alike(quantizer: ActivationQuantizer) -> None:
    x = spread(64, 320)
    x[3] = 0
    there = quantizer.to("cuda")
    assert torch.equal(there(x.cuda()).cpu(), quantizer(x))
    ours, theirs = quantizer.codes(x), there.codes(x.cuda())
    assert torch.equal(stored_bytes(ours.codes), stored_bytes(theirs.codes))
    assert torch.equal(stored_bytes(ours.scale), stored_bytes(theirs.scale))
