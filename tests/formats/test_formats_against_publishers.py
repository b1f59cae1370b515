"""Our arithmetic against checkpoints that the publishers' own tools wrote, with their SHA-256 per matrix."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vtensors_formats.fp8 import FP8Weight, canonical_scale
from vtensors_formats.mxfp8 import MXFP8Weight, quantize_mxfp8
from vtensors_formats.nvfp4 import NVFP4Weight, quantize_nvfp4
from vtensors_formats.plain import PlainWeight
from vtensors_formats.weight import Weight

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"

pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="../shared/checkpoints is absent")


def load(name: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((CHECKPOINTS / name).glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def read(tensors: dict[str, torch.Tensor], module: str) -> Weight:
    """The weight by the dtypes of its tensors alone; enough for these files."""
    packed = tensors.get(f"{module}.weight_packed")
    if packed is not None:
        divisor = tensors[f"{module}.weight_global_scale"].reshape(())
        return NVFP4Weight(
            codes=packed, block_scale=tensors[f"{module}.weight_scale"], global_divisor=divisor
        )
    codes = tensors[f"{module}.weight"]
    scale = tensors.get(f"{module}.weight_scale", tensors.get(f"{module}.weight_scale_inv"))
    if scale is None:
        return PlainWeight(tensor=codes)
    if codes.dtype == torch.uint8:
        return NVFP4Weight(
            codes=codes,
            block_scale=scale,
            global_scale=tensors[f"{module}.weight_scale_2"],
            pre_scale=tensors.get(f"{module}.pre_quant_scale"),
        )
    if scale.dtype == torch.uint8:
        return MXFP8Weight(codes=codes, scale=scale)
    per_row = scale.shape[:1] == codes.shape[:1]
    grid = (128, 128) if scale.ndim >= 2 and not per_row else None
    canonical, block = canonical_scale(scale, (codes.shape[0], codes.shape[1]), grid)
    return FP8Weight(codes=codes, scale=canonical, block=block)


@pytest.mark.parametrize(
    "name",
    [
        "kjv-dense-llmcompressor-fp8dynamic",
        "kjv-dense-llmcompressor-nvfp4-all",
        "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn",
        "llamaedge-llmcompressor-fp8block",
        "llamaedge-modelopt-nvfp4-kvfp8",
        "llamazero-modelopt-nvfp4",
        "qwen3-transformers-fp8block",
        "qwen35-llmcompressor-fp8static-kvfp8",
        "qwen35-llmcompressor-mixed",
        "qwen35-modelopt-fp8-block",
        "qwen35-modelopt-fp8-pcpt",
        "qwen35-modelopt-mxfp8",
        "qwen35-modelopt-nvfp4-awqlite",
    ],
)
def test_every_matrix_has_the_publisher_s_bits(name: str) -> None:
    tensors = load(name)
    oracle = json.loads((CHECKPOINTS / name / "oracle" / "oracle.json").read_text())
    for tensor, digest in oracle["weights_float32_sha256"].items():
        weight = read(tensors, tensor.removesuffix(".weight"))
        weight.check_values({"codes": tensor})
        # The oracles write -0.0 as 0.0.
        values = weight.dequantize() + 0.0
        assert hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest() == digest, tensor


def test_nvfp4_encoding_gives_modelopt_s_bytes() -> None:
    source, written = load("qwen35-transformers-bf16"), load("qwen35-modelopt-w4a16nvfp4")
    modules = [name.removesuffix(".weight_scale_2") for name in written if name.endswith(".weight_scale_2")]
    assert len(modules) == 25
    for module in modules:
        weight = quantize_nvfp4(source[f"{module}.weight"], written[f"{module}.weight_scale_2"])
        assert torch.equal(weight.codes, written[f"{module}.weight"]), module
        scales = (weight.block_scale, written[f"{module}.weight_scale"])
        assert torch.equal(*(scale.view(torch.uint8) for scale in scales)), module


def test_a_global_scale_of_our_own_is_modelopt_s_where_no_sibling_shares_it() -> None:
    source, written = load("qwen35-transformers-bf16"), load("qwen35-modelopt-w4a16nvfp4")
    downs = [name for name in written if name.endswith("down_proj.weight_scale_2")]
    assert downs
    for name in downs:
        own = quantize_nvfp4(source[name.removesuffix("_scale_2")]).global_scale
        assert own is not None
        assert torch.equal(own, written[name])


def test_mxfp8_encoding_gives_modelopt_s_bytes() -> None:
    source, written = load("qwen35-transformers-bf16"), load("qwen35-modelopt-mxfp8")
    names = [name for name, tensor in written.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(names) == 25
    for name in names:
        weight = quantize_mxfp8(source[name])
        assert torch.equal(weight.scale, written[f"{name}_scale"]), name
        assert torch.equal(weight.codes.view(torch.uint8), written[name].view(torch.uint8)), name
