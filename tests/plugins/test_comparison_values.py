from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from builtin_examples import DOWN, UP, K, N, compressed, e4m3_codes, modelopt, nvfp4_parts
from vtensors.checkpoint import open_checkpoint
from vtensors.comparison import compare
from vtensors.errors import CheckpointError
from vtensors_plugins import row_windows
from vtensors_plugins.comparison_values import ValueComparison, Verdict, compare_values, total_bytes
from vtensors_plugins.row_windows import RowWindows, common_windows
from vtensors_plugins.tensor_distance import Distance, ValueDistance, ordered

MODELOPT = modelopt("NVFP4", group_size=16)
COMPRESSED = compressed(
    "nvfp4-pack-quantized",
    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
)
# public fault B11: 1 / (1 / x) is one ULP below x in float32.
B11 = 0.00041069428


def write(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {"model_type": "of-nobody"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def values(one: Path, two: Path) -> ValueComparison:
    before, after = open_checkpoint(one), open_checkpoint(two)
    comparison = compare(before, after)
    done: list[int] = []
    found = compare_values(before, after, (comparison.modules, comparison.kv_scales), done.append)
    assert sum(done) == total_bytes(before, after, comparison.modules) == found.compared_bytes
    return found


def as_modelopt(g: float = B11, **more: Tensor) -> dict[str, Tensor]:
    codes, scale, _ = nvfp4_parts()
    own = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(g), **more}
    return {f"{name}.{suffix}": tensor.clone() for name in (UP, DOWN) for suffix, tensor in own.items()}


def as_compressed(divisor: Tensor) -> dict[str, Tensor]:
    codes, scale, _ = nvfp4_parts()
    own = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor.reshape(1)}
    return {f"{name}.{suffix}": tensor.clone() for name in (UP, DOWN) for suffix, tensor in own.items()}


def test_a_copy_has_the_same_bits(tmp_path: Path) -> None:
    found = values(
        write(tmp_path / "a", as_modelopt(), MODELOPT), write(tmp_path / "b", as_modelopt(), MODELOPT)
    )
    assert found.verdict is Verdict.SAME
    assert found.to_json()["modules"] == []


def test_the_reciprocal_of_b11_is_the_same_weight_in_another_convention(tmp_path: Path) -> None:
    divisor = torch.tensor(1.0) / torch.tensor(B11)
    assert float(torch.tensor(1.0) / divisor) != float(torch.tensor(B11))
    found = values(
        write(tmp_path / "a", as_modelopt(), MODELOPT),
        write(tmp_path / "b", as_compressed(divisor), COMPRESSED),
    )
    assert found.verdict is Verdict.OTHER_CONVENTION
    assert found.verdict == "same weights, other convention"
    assert found.reciprocal_ulp == 1
    assert found.counts == {"same weights, other convention": 2}
    entry = found.to_json()["modules"][0]
    assert entry["tensors"]["codes"]["different"] == entry["tensors"]["block_scale"]["different"] == 0
    assert entry["dequantized"] is None


def test_a_divisor_two_ulp_away_is_another_weight(tmp_path: Path) -> None:
    divisor = torch.tensor(1.0) / torch.tensor(B11)
    moved = torch.nextafter(torch.nextafter(divisor, torch.tensor(0.0)), torch.tensor(0.0))
    assert abs(int(ordered(torch.tensor(B11)) - ordered(torch.tensor(1.0) / moved))) >= 2
    found = values(
        write(tmp_path / "a", as_modelopt(), MODELOPT),
        write(tmp_path / "b", as_compressed(moved), COMPRESSED),
    )
    assert found.verdict is Verdict.DIFFERENT
    assert found.modules[0].dequantized is not None
    assert found.modules[0].dequantized.max_ulp >= 1


def test_one_code_that_differs_is_counted_and_dequantized(tmp_path: Path) -> None:
    other = as_modelopt()
    other[f"{UP}.weight"][5, 7] ^= 0x01
    found = values(write(tmp_path / "a", as_modelopt(), MODELOPT), write(tmp_path / "b", other, MODELOPT))
    by_name = {module.before: module for module in found.modules}
    assert by_name[DOWN].verdict is Verdict.SAME
    changed = by_name[UP]
    assert changed.verdict is Verdict.DIFFERENT
    assert (changed.distances["codes"].different, changed.distances["codes"].elements) == (1, N * K // 2)
    assert changed.dequantized is not None
    assert (changed.dequantized.different, changed.dequantized.elements) == (1, N * K)
    assert changed.dequantized.snr_db is not None


def test_another_input_scale_leaves_the_weights_the_same(tmp_path: Path) -> None:
    sides = [
        write(tmp_path / name, as_modelopt(input_scale=torch.tensor(scale)), MODELOPT)
        for name, scale in (("a", 0.002), ("b", 0.003))
    ]
    found = values(*sides)
    assert found.verdict is Verdict.OTHER_ACTIVATION
    assert found.modules[0].distances["input_scale"].different == 1


def test_a_wider_scale_dtype_with_the_same_values_is_no_difference(tmp_path: Path) -> None:
    scale = torch.linspace(0.01, 1, N).reshape(N, 1).to(torch.bfloat16)
    config = modelopt("FP8_PER_CHANNEL_PER_TOKEN")
    sides = [
        write(tmp_path / name, {f"{UP}.weight": e4m3_codes(), f"{UP}.weight_scale": stored}, config)
        for name, stored in (("a", scale), ("b", scale.float()))
    ]
    assert values(*sides).verdict is Verdict.SAME


def test_one_scale_for_all_and_the_same_per_row_are_the_same_values(tmp_path: Path) -> None:
    config = modelopt("FP8")
    sides = [
        write(tmp_path / name, {f"{UP}.weight": e4m3_codes(), f"{UP}.weight_scale": scale}, config)
        for name, scale in (("a", torch.tensor(0.25)), ("b", torch.full((N, 1), 0.25)))
    ]
    found = values(*sides)
    assert found.verdict is Verdict.SAME_VALUES
    assert found.modules[0].dequantized is not None
    assert found.modules[0].dequantized.different == 0


def test_a_bias_on_one_side_is_a_difference(tmp_path: Path) -> None:
    weight = torch.ones(N, K, dtype=torch.bfloat16)
    bias = torch.ones(N, dtype=torch.bfloat16)
    one = write(tmp_path / "a", {f"{UP}.weight": weight}, None)
    two = write(tmp_path / "b", {f"{UP}.weight": weight, f"{UP}.bias": bias}, None)
    assert values(one, two).verdict is Verdict.DIFFERENT


def test_other_shapes_are_not_compared(tmp_path: Path) -> None:
    one = write(tmp_path / "a", {f"{UP}.weight": torch.ones(4, 4)}, None)
    two = write(tmp_path / "b", {f"{UP}.weight": torch.ones(4, 8)}, None)
    found = values(one, two)
    assert found.verdict is Verdict.NOT_COMPARED
    assert found.modules[0].reason == "shapes [4, 4] and [4, 8]"


def test_stacked_experts_have_the_bits_of_single_ones(shared: Path) -> None:
    folder = shared / "checkpoints"
    found = values(folder / "qwen35moe-transformers-bf16", folder / "qwen35moe-transformers-bf16fused")
    assert found.verdict is Verdict.SAME
    assert len(found.modules) == 80


def test_experts_whose_scales_alone_are_stacked_are_read_as_they_are(tmp_path: Path) -> None:
    owner = "model.layers.0.mlp.experts"
    tensors = {
        f"{owner}.{expert}.{part}.weight": e4m3_codes(128, 128)
        for expert in range(4)
        for part in ("gate_proj", "up_proj")
    }
    tensors[f"{owner}.gate_up_proj_scale_inv"] = torch.arange(1, 9, dtype=torch.float32).reshape(4, 2, 1) / 64
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folder = write(tmp_path / "a", tensors, quantization)
    checkpoint = open_checkpoint(folder)
    with row_windows.TensorReader(checkpoint.snapshot, mmap=False) as reader:
        for name in (f"{owner}.0.gate_proj", f"{owner}.3.up_proj"):
            windows = RowWindows.of(checkpoint, name, reader)
            read = windows.read(0, windows.rows).dequantize(torch.float32)
            assert torch.equal(read, checkpoint.read(name).dequantize(torch.float32))
    found = values(folder, folder)
    assert (found.verdict, len(found.modules)) == (Verdict.SAME, 8)


def test_kv_scales_are_compared_by_value(tmp_path: Path) -> None:
    attention = "model.layers.0.self_attn"
    base = {f"{attention}.q_proj.weight": torch.ones(2, 2), f"{attention}.v_scale": torch.tensor(1.0)}
    one = write(tmp_path / "a", {**base, f"{attention}.k_scale": torch.tensor(0.5)}, None)
    two = write(tmp_path / "b", {**base, f"{attention}.k_scale": torch.tensor(0.25)}, None)
    found = values(one, two)
    assert [m.before for m in found.modules if m.verdict is Verdict.DIFFERENT] == [
        f"KV-cache scales of {attention}"
    ]


@pytest.mark.parametrize("elements", [1, 64, 1000, 160 * 192])
def test_windows_of_any_size_give_the_same_weight(
    tmp_path: Path, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_windows, "WINDOW_ELEMENTS", elements)
    grid = torch.tensor([[0.01, 0.02], [0.03, 0.04]])
    block = {f"{UP}.weight": e4m3_codes(160, 192), f"{UP}.weight_scale_inv": grid}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    codes, scale, _ = nvfp4_parts()
    rows = {
        f"{UP}.weight": codes,
        f"{UP}.weight_scale": scale,
        f"{UP}.weight_scale_2": torch.tensor(B11),
        f"{UP}.bias": torch.arange(N, dtype=torch.float32),
    }
    for name, tensors, config in (("block", block, quantization), ("nvfp4", rows, MODELOPT)):
        checkpoint = open_checkpoint(write(tmp_path / name, tensors, config))
        with row_windows.TensorReader(checkpoint.snapshot, mmap=False) as reader:
            windows = RowWindows.of(checkpoint, UP, reader)
            parts = [
                windows.read(*rows).dequantize(torch.float32) for rows in common_windows(windows, windows)
            ]
        assert torch.equal(torch.cat(parts), checkpoint.read(UP).dequantize(torch.float32))
        assert values(tmp_path / name, tmp_path / name).verdict is Verdict.SAME


def test_a_file_cut_short_while_it_is_compared_is_an_error(tmp_path: Path) -> None:
    one = write(tmp_path / "a", as_modelopt(), MODELOPT)
    two = write(tmp_path / "b", as_modelopt(), MODELOPT)
    before, after = open_checkpoint(one), open_checkpoint(two)
    changes = compare(before, after)
    with (two / "model.safetensors").open("r+b") as stream:
        stream.truncate(500)
    with pytest.raises(CheckpointError, match="changed while open"):
        compare_values(before, after, (changes.modules, changes.kv_scales), lambda count: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_counts_representable_values_across_zero(dtype: torch.dtype) -> None:
    tiny = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    found = ordered(
        torch.stack([-tiny, torch.tensor(-0.0, dtype=dtype), torch.tensor(0.0, dtype=dtype), tiny])
    )
    assert found.tolist() == [-1, 0, 0, 1]


def test_the_sign_of_a_zero_is_a_bit_but_no_value() -> None:
    bits, dequantized = Distance(), ValueDistance()
    zeros = torch.tensor([0.0]), torch.tensor([-0.0])
    bits.add(*zeros)
    dequantized.add(*zeros)
    assert (bits.different, bits.max_ulp) == (1, 0)
    assert dequantized.different == 0


def test_signal_to_noise_is_over_all_windows() -> None:
    distance = ValueDistance()
    distance.add(torch.ones(10), torch.ones(10))
    distance.add(torch.ones(10), torch.full((10,), 1.1))
    assert distance.snr_db == pytest.approx(10 * torch.log10(torch.tensor(20 / (10 * 0.01))).item(), abs=1e-3)
