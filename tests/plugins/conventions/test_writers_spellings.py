"""Spellings that the publishers' tools write and that are easy to miss: other groups, stray axes, split experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import builtin_examples as examples
import vtensors
from builtin_examples import E2M1, UP, K, Module, N, e4m3_codes
from vtensors.accounting import UNUSED_SCALE
from vtensors.errors import ClaimError, VtensorsError
from vtensors_formats import FP8Weight, MXFP8Activation, NVFP4Weight
from vtensors_formats.e8m0 import ExponentRule

EXPERTS = "model.layers.0.mlp.experts"


def read(folder: Path, name: str) -> Any:
    return vtensors.open_checkpoint(folder).read(name)


def save(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "of-nobody", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def nvfp4_in_groups_of(group: int) -> Module:
    packed, _, values = examples.nvfp4_parts()
    scale = torch.linspace(0.5, 448, N * K // group).reshape(N, K // group).to(torch.float8_e4m3fn)
    total = torch.tensor(0.00037)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": total}
    expected = values * (scale.float() * total).repeat_interleave(group, 1)
    return Module(tensors={**tensors, "input_scale": torch.tensor(0.002)}, expected=expected)


@pytest.mark.parametrize("algorithm", ["W4A8_NVFP4_FP8", "W4A16_NVFP4"])
@pytest.mark.parametrize("group", [16, 32])
def test_modelopt_nvfp4_is_read_in_groups_of_16_and_32(tmp_path: Path, algorithm: str, group: int) -> None:
    quantization = examples.modelopt(algorithm, group_size=group)
    expected = examples.write(tmp_path, {UP: nvfp4_in_groups_of(group)}, quantization)
    weight = read(tmp_path, UP)
    assert isinstance(weight, NVFP4Weight)
    assert weight.group == group
    assert torch.equal(weight.dequantize(torch.float32), expected[UP])
    assert torch.equal(weight.rows(5, 9).dequantize(torch.float32), expected[UP][5:9])


@pytest.mark.parametrize(("declared", "stored"), [(16, 32), (32, 16)])
def test_nvfp4_groups_other_than_declared_are_refused(tmp_path: Path, declared: int, stored: int) -> None:
    quantization = examples.modelopt("W4A16_NVFP4", group_size=declared)
    examples.write(tmp_path, {UP: nvfp4_in_groups_of(stored)}, quantization)
    with pytest.raises(ClaimError, match=r"up_proj\.weight_scale: .*other groups than declared"):
        read(tmp_path, UP)


def test_the_group_size_of_hf_quant_config_counts_where_config_json_has_none(tmp_path: Path) -> None:
    examples.write(tmp_path, {UP: nvfp4_in_groups_of(32)}, examples.modelopt("W4A16_NVFP4"))
    legacy = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": legacy})
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ClaimError, match="other groups than declared"):
        read(tmp_path, UP)


def test_a_zero_block_scale_of_a_group_of_32_is_found_under_its_own_codes() -> None:
    scale = torch.ones(1, 2).to(torch.float8_e4m3fn)
    scale[0, 1] = 0.0
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    weight = NVFP4Weight(codes=codes, block_scale=scale, global_scale=torch.tensor(1.0))
    weight.check_values({})
    codes[0, 31] = 0x20
    with pytest.raises(VtensorsError, match="block scale"):
        weight.check_values({})
    assert E2M1[2] == 1.0


def test_compressed_tensors_mxfp8_activations_round_a_mantissa_of_1_75_up(tmp_path: Path) -> None:
    arguments = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True}
    quantization = examples.compressed("mxfp8-quantized", arguments)
    group = quantization["config_groups"]["group_0"]
    group["input_activations"] = {**arguments, "dynamic": True}
    examples.write(tmp_path, {UP: examples.mxfp8()}, quantization)
    activation = read(tmp_path, UP).activation
    assert isinstance(activation, MXFP8Activation)
    assert activation.rule is ExponentRule.FLOOR_ROUNDED
    x = torch.zeros(1, 32)
    x[0, 0] = 448.0
    assert int(activation.codes(x).scale[0, 0]) == 128


def test_compressed_tensors_fp8_in_groups_of_k_is_a_block_of_one_row(tmp_path: Path) -> None:
    scale = torch.linspace(0.01, 1, N * K // 32).reshape(N, K // 32).to(torch.bfloat16)
    expected = e4m3_codes().float() * scale.float().repeat_interleave(32, 1)
    module = Module(tensors={"weight": e4m3_codes(), "weight_scale": scale}, expected=expected)
    arguments = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}
    examples.write(tmp_path, {UP: module}, examples.compressed("naive-quantized", arguments))
    assert torch.equal(read(tmp_path, UP).dequantize(torch.float32), expected)


@pytest.mark.parametrize("groups", [{}, None])
def test_only_the_kv_cache_may_be_quantized(tmp_path: Path, groups: Any) -> None:
    kv = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": kv}
    examples.write(tmp_path, {UP: examples.plain(torch.bfloat16)}, {**quantization, "config_groups": groups})
    checkpoint = vtensors.open_checkpoint(tmp_path)
    assert checkpoint.modules[UP].scheme == "bf16"
    assert checkpoint.kv_cache is not None
    assert checkpoint.kv_cache.algorithm == "FP8"


def test_one_dynamic_scale_for_all_tokens_is_said_to_become_one_per_token(tmp_path: Path) -> None:
    quantization = examples.compressed(
        "float-quantized", {"type": "float", "num_bits": 8, "strategy": "tensor"}
    )
    inputs = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": True}
    quantization["config_groups"]["group_0"]["input_activations"] = inputs
    module = examples.fp8_tensor()
    module.tensors.pop("input_scale")
    examples.write(tmp_path, {UP: module}, quantization)
    checkpoint = vtensors.open_checkpoint(tmp_path)
    assert any("each token gets its own" in text for text in checkpoint.warnings)


def affine(folder: Path) -> Path:
    name = "model.layers.0.self_attn"
    tensors = {f"{name}.{p}_proj.weight": torch.ones(4, 4, dtype=torch.bfloat16) for p in "qkvo"}
    for p in "kv":
        tensors[f"{name}.{p}_proj.{p}_scale"] = torch.tensor(0.02)
        tensors[f"{name}.{p}_proj.{p}_bias"] = torch.zeros(1, 2, 1, 2, dtype=torch.bfloat16)
    return save(folder, tensors, examples.modelopt("FP8", ignore=["*"], kv_cache_scheme="NVFP4_AFFINE"))


def test_the_centres_of_an_affine_kv_cache_are_accounted_for_and_not_a_linear_bias(tmp_path: Path) -> None:
    checkpoint = vtensors.open_checkpoint(affine(tmp_path))
    checkpoint.check()
    assert checkpoint.read("model.layers.0.self_attn.k_proj").bias is None


def test_an_affine_kv_cache_is_refused_where_its_scales_are_asked_for(tmp_path: Path) -> None:
    checkpoint = vtensors.open_checkpoint(affine(tmp_path))
    with pytest.raises(ClaimError, match=r"k_proj\.k_bias: an affine KV cache is not supported"):
        checkpoint.kv_scales()


def hf_fp8(block: list[int] | None, scheme: str = "dynamic") -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block}


@pytest.mark.parametrize("rows", [160, 64], ids=["larger than a block", "smaller than a block"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_transformers_keeps_one_scale_in_up_to_two_dimensions(
    tmp_path: Path, shape: tuple[int, ...], rows: int
) -> None:
    codes = e4m3_codes(rows, 96)
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale_inv": torch.full(shape, 0.0123)}
    weight = read(save(tmp_path, tensors, hf_fp8(None)), UP)
    assert weight.scheme == "fp8-tensor"
    assert torch.equal(weight.dequantize(torch.float32), codes.float() * torch.tensor(0.0123))


def experts(block: list[int] | None, rows: int, own: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Two experts, gate and up of `rows` each, K = 64; tensors, fused scale [2, R, C], values [2, 2 rows, K]."""
    fused = e4m3_codes(4 * rows, K).view(2, 2 * rows, K)
    if block is None:
        scale = torch.tensor([0.01, 0.02]).view(2, 1, 1)
        spread = scale
    else:
        grid = (2, -(-2 * rows // block[0]), -(-K // block[1]))
        scale = torch.linspace(0.01, 1, grid[0] * grid[1] * grid[2]).view(grid)
        wide = scale.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
        spread = wide[:, : 2 * rows, :K]
    tensors = {f"{EXPERTS}.gate_up_proj_scale_inv": scale}
    if not own:
        return {**tensors, f"{EXPERTS}.gate_up_proj": fused}, scale, fused.float() * spread
    for expert in range(2):
        tensors[f"{EXPERTS}.{expert}.gate_proj.weight"] = fused[expert, :rows].clone()
        tensors[f"{EXPERTS}.{expert}.up_proj.weight"] = fused[expert, rows:].clone()
    return tensors, scale, fused.float() * spread


@pytest.mark.parametrize("own", [True, False], ids=["weight-per-expert", "stacked"])
@pytest.mark.parametrize(("block", "rows"), [(None, 48), ([48, 32], 48), ([64, 32], 96)], ids=str)
def test_transformers_experts_are_read_under_the_scales_of_all(
    tmp_path: Path, block: list[int] | None, rows: int, own: bool
) -> None:
    tensors, _, values = experts(block, rows, own)
    inputs = torch.tensor([0.5, 0.25])
    tensors[f"{EXPERTS}.gate_up_proj_activation_scale"] = inputs
    checkpoint = vtensors.open_checkpoint(save(tmp_path, tensors, hf_fp8(block, "static")))
    checkpoint.check()
    for expert in range(2):
        for number, half in enumerate(("gate_proj", "up_proj")):
            weight = checkpoint.read(f"{EXPERTS}.{expert}.{half}")
            wanted = values[expert, number * rows : (number + 1) * rows]
            assert isinstance(weight, FP8Weight)
            assert torch.equal(weight.dequantize(torch.float32), wanted)
            x = torch.full((1, K), 1000.0)
            assert weight.activation is not None
            assert torch.equal(weight.activation(x), torch.full((1, K), 448.0 * float(inputs[expert])))


@pytest.mark.parametrize("own", [True, False], ids=["weight-per-expert", "stacked"])
def test_gate_and_up_may_have_a_scale_each(tmp_path: Path, own: bool) -> None:
    tensors, _, values = experts(None, 48, own)
    tensors[f"{EXPERTS}.gate_up_proj_scale_inv"] = torch.tensor([[0.01, 0.03], [0.02, 0.05]]).view(2, 2, 1)
    checkpoint = vtensors.open_checkpoint(save(tmp_path, tensors, hf_fp8(None)))
    up = checkpoint.read(f"{EXPERTS}.1.up_proj").dequantize(torch.float32)
    codes = tensors[f"{EXPERTS}.1.up_proj.weight"] if own else tensors[f"{EXPERTS}.gate_up_proj"][1, 48:]
    assert torch.equal(up, codes.float() * torch.tensor(0.05))
    assert values.shape == (2, 96, K)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("scale-shape", "gate_up_proj_scale_inv"),
        ("scale-missing", "gate_proj"),
        ("expert-too-many", "experts.2.gate_proj"),
        ("weight-dtype", "gate_proj"),
        ("stray", "gate_up_proj_zeros"),
    ],
)
def test_experts_that_do_not_fit_the_scales_of_all_are_refused(
    tmp_path: Path, change: str, told: str
) -> None:
    tensors, scale, _ = experts([48, 32], 48, True)
    first = f"{EXPERTS}.0.gate_proj.weight"
    if change == "scale-shape":
        tensors[f"{EXPERTS}.gate_up_proj_scale_inv"] = scale.transpose(1, 2).repeat(1, 1, 2).contiguous()
    elif change == "scale-missing":
        del tensors[f"{EXPERTS}.gate_up_proj_scale_inv"]
    elif change == "expert-too-many":
        tensors[f"{EXPERTS}.2.gate_proj.weight"] = tensors[first].clone()
    elif change == "weight-dtype":
        tensors[first] = tensors[first].to(torch.float8_e5m2)
    else:
        tensors[f"{EXPERTS}.gate_up_proj_zeros"] = torch.zeros(2)
    with pytest.raises(VtensorsError) as caught:
        vtensors.open_checkpoint(save(tmp_path, tensors, hf_fp8([48, 32]))).check()
    assert told in str(caught.value)


@pytest.mark.parametrize("shape", [(400, 128), (128, 400), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_a_matrix_that_the_writer_left_unquantized_is_plain_and_its_unfilled_scale_is_listed(
    tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """transformers saves an unfilled scale beside a matrix whose sides are no multiples of the block."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.full((-(-shape[0] // 128), -(-shape[1] // 128)), float("nan")).to(dtype)
    tensors = {f"{UP}.weight": weight, f"{UP}.weight_scale_inv": scale}
    checkpoint = vtensors.open_checkpoint(save(tmp_path, tensors, hf_fp8([128, 128])))
    checkpoint.check()
    module = checkpoint.modules[UP]
    assert (module.convention, module.scheme, module.declared) == ("hf-fp8", "bf16", "16bit")
    assert torch.equal(checkpoint.read(UP).dequantize(torch.bfloat16), weight)
    assert [conflict.where for conflict in checkpoint.conflicts] == [UP]
    assert checkpoint.accounting.waived == {UNUSED_SCALE: (f"{UP}.weight_scale_inv",)}


@pytest.mark.parametrize(
    ("shape", "block"), [((256, 128), [128, 128]), ((400, 128), None), ((400, 128), [400, 128])]
)
def test_a_scale_beside_a_plain_matrix_that_could_have_been_quantized_is_refused_by_name(
    tmp_path: Path, shape: tuple[int, int], block: list[int] | None
) -> None:
    rows, columns = block or (1, 1)
    grid = (-(-shape[0] // rows), -(-shape[1] // columns)) if block else (1, 1)
    tensors = {
        f"{UP}.weight": torch.ones(shape, dtype=torch.bfloat16),
        f"{UP}.weight_scale_inv": torch.ones(grid),
    }
    with pytest.raises(ClaimError, match="weight is BF16, yet 'weight_scale_inv' is beside it"):
        vtensors.open_checkpoint(save(tmp_path, tensors, hf_fp8(block))).check()


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo", "FP8_BLOCK_SCALES"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_modelopt_fp8_blocks_have_the_size_that_group_size_declares(
    tmp_path: Path, algorithm: str, everywhere: bool
) -> None:
    own = {"quant_algo": algorithm, "group_size": 16}
    listed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: own}}
    codes = e4m3_codes(N, K)
    scale = torch.linspace(0.5, 1.5, -(-N // 16) * -(-K // 16)).reshape(-(-N // 16), -(-K // 16))
    tensors = {f"{UP}.weight": codes, f"{UP}.weight_scale": scale}
    save(tmp_path, tensors, {"quant_method": "modelopt", **(own if everywhere else listed)})
    full = scale.repeat_interleave(16, 0)[:N].repeat_interleave(16, 1)[:, :K]
    assert torch.equal(read(tmp_path, UP).dequantize(torch.float32), codes.float() * full)
