"""Stacked experts of every layout become one module per expert, with the values they had."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import write_json, write_safetensors
from conversion.stored import f32, run, stored_tensors
from vtensors import open_checkpoint

Table = dict[str, tuple[str, tuple[int, ...], bytes]]
EXPERTS = "model.layers.0.mlp.experts"
BLOCK = [128, 128]


def _codes(count: int, seed: int) -> bytes:
    """Bytes that are finite as E4M3 and legal as two E2M1 codes."""
    return bytes(random.Random(seed).choices(range(0x08, 0x78), k=count))


def _nvfp4(shape: tuple[int, int, int], transposed: bool) -> Table:
    """gate_up_proj of E experts, K-last or K-first."""
    e, n, k = shape
    codes = (e, k // 2, n) if transposed else (e, n, k // 2)
    scales = (e, k // 16, n) if transposed else (e, n, k // 16)
    base = f"{EXPERTS}.gate_up_proj"
    globals_ = [0.5 + expert for expert in range(e)]
    return {
        base: ("U8", codes, _codes(e * n * k // 2, 1)),
        f"{base}_weight_scale": ("F8_E4M3", scales, _codes(e * n * k // 16, 2)),
        f"{base}_weight_scale_2": ("F32", (e,), f32(*globals_)),
    }


def _modelopt(folder: Path, tensors: Table) -> Path:
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    block = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    write_json(folder / "config.json", {"model_type": "unheard_of", "quantization_config": block})
    return folder


def _fp8(folder: Path, tensors: Table, block: list[int] | None = BLOCK) -> Path:
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    declared = {"quant_method": "fp8", "weight_block_size": block}
    write_json(folder / "config.json", {"model_type": "unheard_of", "quantization_config": declared})
    return folder


def _same_values(source: Path, out: Path) -> None:
    before, after = open_checkpoint(source), open_checkpoint(out)
    assert before.modules.keys() == after.modules.keys()
    assert len(before.modules) == 4
    for name in before.modules:
        wanted, found = before.read(name).dequantize(), after.read(name).dequantize()
        # One reciprocal of the global scale: one ULP, and a rounding more in scale * global.
        assert bool(((found - wanted).abs() <= 2.0**-22 * wanted.abs()).all()), name
    assert after.conflicts == after.accounting.problems == ()


@pytest.mark.parametrize("transposed", [False, True], ids=["K last", "K first"])
@pytest.mark.parametrize("shape", [(2, 32, 64), (2, 64, 64)])
def test_stacked_nvfp4_of_modelopt(
    shape: tuple[int, int, int], transposed: bool, tmp_path: Path, capsys: Any
) -> None:
    source = _modelopt(tmp_path / "source", _nvfp4(shape, transposed))
    status, report = run(capsys, "convert", source, tmp_path / "out", "--to", "compressed-tensors")
    assert status == 0, report
    half = shape[1] // 2
    stored = stored_tensors(tmp_path / "out")
    assert stored[f"{EXPERTS}.1.up_proj.weight_packed"].shape == (half, shape[2] // 2)
    assert stored[f"{EXPERTS}.1.up_proj.weight_global_scale"].shape == (1,)
    _same_values(source, tmp_path / "out")


def test_stacked_tensors_that_stay_are_copied_whole(tmp_path: Path, capsys: Any) -> None:
    source = _modelopt(tmp_path / "source", _nvfp4((2, 32, 64), True))
    assert run(capsys, "convert", source, tmp_path / "out", "--to", "modelopt")[0] == 0
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors"])
def test_stacked_fp8_blocks(target: str, tmp_path: Path, capsys: Any) -> None:
    base = f"{EXPERTS}.gate_up_proj"
    tensors: Table = {
        base: ("F8_E4M3", (2, 512, 160), _codes(2 * 512 * 160, 3)),
        f"{base}_scale_inv": ("F32", (2, 4, 2), f32(*(0.25 * n + 0.5 for n in range(16)))),
    }
    source = _fp8(tmp_path / "source", tensors)
    assert run(capsys, "convert", source, tmp_path / "out", "--to", target)[0] == 0
    _same_values(source, tmp_path / "out")


def test_experts_that_share_a_scale_block_are_refused_by_name_and_go_to_plain(
    tmp_path: Path, capsys: Any
) -> None:
    base = f"{EXPERTS}.gate_up_proj"
    tensors: Table = {
        base: ("F8_E4M3", (2, 192, 128), _codes(2 * 192 * 128, 3)),
        f"{base}_scale_inv": ("F32", (2, 2, 1), f32(0.5, 1.0, 1.5, 2.0)),
    }
    source = _fp8(tmp_path / "source", tensors)
    status, report = run(capsys, "convert", source, tmp_path / "out", "--to", "modelopt")
    assert status == 2
    assert report["error"]["tensor"] == f"{EXPERTS}.0.up_proj"
    assert run(capsys, "convert", source, tmp_path / "same", "--to", "hf-fp8")[0] == 0
    assert stored_tensors(tmp_path / "same") == stored_tensors(source)
    assert run(capsys, "convert", source, tmp_path / "plain", "--to", "plain:f32")[0] == 0
    _same_values(source, tmp_path / "plain")


@pytest.mark.parametrize("dtype", ["F32", "F8_E8M0"])
@pytest.mark.parametrize("halves", [1, 2])
def test_stacked_fp8_with_one_scale_for_gate_and_up_or_one_for_each(
    halves: int, dtype: str, tmp_path: Path, capsys: Any
) -> None:
    base = f"{EXPERTS}.gate_up_proj"
    exponents = [126 + place for place in range(2 * halves)]
    scales = bytes(exponents) if dtype == "F8_E8M0" else f32(*(2.0 ** (e - 127) for e in exponents))
    tensors: Table = {
        base: ("F8_E4M3", (2, 64, 32), _codes(2 * 64 * 32, 3)),
        f"{base}_scale_inv": (dtype, (2, halves, 1), scales),
    }
    source = _fp8(tmp_path / "source", tensors, block=None)
    before = open_checkpoint(source)
    for expert in range(2):
        for half, name in enumerate(("gate_proj", "up_proj")):
            codes = _decoded(tensors[base][2], (2, 64, 32))[expert, 32 * half : 32 * half + 32]
            scale = 2.0 ** (exponents[expert * halves + half * (halves - 1)] - 127)
            weight = before.read(f"{EXPERTS}.{expert}.{name}")
            assert weight.scheme == "fp8-tensor"
            assert torch.equal(weight.dequantize(), codes * scale)
    assert run(capsys, "convert", source, tmp_path / "out", "--to", "compressed-tensors")[0] == 0
    _same_values(source, tmp_path / "out")


def _decoded(codes: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    stored = torch.frombuffer(bytearray(codes), dtype=torch.uint8)
    return stored.view(torch.float8_e4m3fn).float().reshape(shape)


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "hf-fp8"])
def test_a_weight_per_expert_beside_scales_of_all(target: str, tmp_path: Path, capsys: Any) -> None:
    tensors: Table = {
        f"{EXPERTS}.gate_up_proj_scale_inv": ("F32", (2, 2, 1), f32(0.5, 1.0, 1.5, 2.0)),
    }
    for expert in range(2):
        for half in ("gate_proj", "up_proj"):
            name = f"{EXPERTS}.{expert}.{half}.weight"
            tensors[name] = ("F8_E4M3", (128, 128), _codes(128 * 128, expert))
    source = _fp8(tmp_path / "source", tensors)
    assert run(capsys, "convert", source, tmp_path / "out", "--to", target)[0] == 0
    if target == "hf-fp8":
        assert stored_tensors(tmp_path / "out") == stored_tensors(source)
    _same_values(source, tmp_path / "out")


@pytest.mark.parametrize("target", ["hf-fp8", "compressed-tensors", "modelopt", "plain:f32"])
def test_the_scale_of_a_matrix_that_was_left_unquantized_is_left_out(
    target: str, tmp_path: Path, capsys: Any
) -> None:
    name = "model.layers.0.mlp.up_proj"
    tensors: Table = {
        f"{name}.weight": ("F32", (8, 128), f32(*(place / 64 for place in range(8 * 128)))),
        f"{name}.weight_scale_inv": ("F32", (1, 1), f32(float("nan"))),
    }
    source = _fp8(tmp_path / "source", tensors)
    assert run(capsys, "verify", source)[1]["findings"][0]["code"] == "declared-differs"
    assert run(capsys, "convert", source, tmp_path / "out", "--to", target)[0] == 0
    assert list(stored_tensors(tmp_path / "out")) == [f"{name}.weight"]
    assert stored_tensors(tmp_path / "out")[f"{name}.weight"] == stored_tensors(source)[f"{name}.weight"]
