"""Public faults that concern converters; each test names its entry."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from builders import write_json, write_safetensors
from conversion.stored import f32, modelopt_nvfp4, plain_bf16, run, stored_tensors
from vtensors import open_checkpoint


@pytest.mark.fault("B01")
def test_b01_the_divisor_is_the_reciprocal_and_both_dequantize_alike(tmp_path: Path, capsys: Any) -> None:
    source = modelopt_nvfp4(tmp_path / "source", scale=0.25)
    assert run(capsys, "convert", source, tmp_path / "out", "--to", "compressed-tensors")[0] == 0
    stored = stored_tensors(tmp_path / "out")
    base = "model.layers.0.mlp.up_proj"
    assert stored[f"{base}.weight_global_scale"].values == (4.0,)
    assert stored[f"{base}.weight_global_scale"].shape == (1,)
    assert f"{base}.weight_scale_2" not in stored
    before, after = open_checkpoint(source).read(base), open_checkpoint(tmp_path / "out").read(base)
    assert bool((before.dequantize() == after.dequantize()).all())


@pytest.mark.fault("B07")
@pytest.mark.parametrize("value", [float("inf"), 0.0, float("nan"), -1.0, 1e-45])
def test_b07_a_scale_without_a_reciprocal_is_refused_by_name(
    value: float, tmp_path: Path, capsys: Any
) -> None:
    source = modelopt_nvfp4(tmp_path / "source")
    raw = bytearray((source / "model.safetensors").read_bytes())
    name = "model.layers.0.mlp.up_proj.input_scale"
    info = open_checkpoint(source).snapshot.tensors[name]
    raw[info.begin : info.end] = f32(value)
    (source / "model.safetensors").write_bytes(raw)
    status, report = run(capsys, "convert", source, tmp_path / "out", "--to", "compressed-tensors")
    assert status == 2
    assert report["error"]["tensor"] == name
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.fault("B28")
@pytest.mark.parametrize("place", ["snapshots/abc", "blobs/x", "."])
def test_b28_a_hub_cache_is_not_written_to(place: str, tmp_path: Path, capsys: Any) -> None:
    source = modelopt_nvfp4(tmp_path / "source")
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "snapshots").mkdir(parents=True)
    status, report = run(capsys, "convert", source, repo / place, "--to", "compressed-tensors", "--overwrite")
    assert status == 2
    assert "Hub cache" in report["error"]["message"]
    assert [path.name for path in repo.rglob("*")] == ["snapshots"]


@pytest.mark.fault("B28")
def test_b28_nor_through_a_link_into_it(tmp_path: Path, capsys: Any) -> None:
    source = modelopt_nvfp4(tmp_path / "source")
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    status, report = run(capsys, "convert", source, tmp_path / "link", "--to", "compressed-tensors")
    assert status == 2
    assert "Hub cache" in report["error"]["message"]


@pytest.mark.fault("B28")
def test_b28_nor_below_the_cache_that_a_variable_names(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = modelopt_nvfp4(tmp_path / "source")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    status, _ = run(capsys, "convert", source, tmp_path / "cache" / "x", "--to", "compressed-tensors")
    assert status == 2


def _fp8_blocks(folder: Path, names: tuple[str, ...]) -> Path:
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {
        "lm_head.weight": ("BF16", (4, 64), bytes(512)),
    }
    for name in names:
        tensors[f"{name}.weight"] = ("F8_E4M3", (160, 256), b"\x38\x40" * 20480)
        tensors[f"{name}.weight_scale_inv"] = ("F32", (2, 2), f32(0.5, 1.5, 2.5, 3.5))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    block = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    write_json(folder / "config.json", {"model_type": "unheard_of", "quantization_config": block})
    return folder


@pytest.mark.fault("B29")
@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "hf-fp8"])
def test_b29_the_mtp_head_keeps_its_block_scales(target: str, tmp_path: Path, capsys: Any) -> None:
    names = ("model.layers.0.mlp.up_proj", "mtp.layers.0.mlp.up_proj")
    source = _fp8_blocks(tmp_path / "source", names)
    status, report = run(capsys, "convert", source, tmp_path / "out", "--to", target)
    assert status == 0
    assert report["left_out"] == []
    after = open_checkpoint(tmp_path / "out")
    for name in names:
        assert name in {row["module"] for row in report["modules"]}
        assert after.modules[name].scheme == "fp8-block"
        expected = open_checkpoint(source).read(name).dequantize()
        assert bool((after.read(name).dequantize() == expected).all())


@pytest.mark.fault("B29")
def test_b29_a_writer_that_forgets_a_scale_is_an_error(tmp_path: Path) -> None:
    import attrs

    from vtensors import PluginError
    from vtensors.conversion import Target, plan_conversion
    from vtensors_plugins.conventions.compressed_tensors import CONVENTION

    writer = CONVENTION.write
    assert writer is not None
    forgetful = attrs.evolve(writer, spell=lambda weight: writer.spell(weight)[:2])
    target = Target(convention=CONVENTION, writer=forgetful)
    checkpoint = open_checkpoint(modelopt_nvfp4(tmp_path / "source"))
    with pytest.raises(PluginError, match="leaves out parts of the weight: global_scale, input_scale"):
        plan_conversion(checkpoint, target, lambda module: None)


@pytest.mark.fault("B22")
def test_b22_kv_scales_are_translated_both_ways(tmp_path: Path, capsys: Any) -> None:
    source = modelopt_nvfp4(tmp_path / "source", kv=True)
    assert run(capsys, "convert", source, tmp_path / "ct", "--to", "compressed-tensors")[0] == 0
    there = stored_tensors(tmp_path / "ct")
    assert there["model.layers.0.self_attn.k_scale"].shape == (1,)
    assert json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert run(capsys, "convert", tmp_path / "ct", tmp_path / "back", "--to", "modelopt")[0] == 0
    name = "model.layers.0.self_attn.k_proj.k_scale"
    assert stored_tensors(tmp_path / "back")[name] == stored_tensors(source)[name]
    scales = open_checkpoint(tmp_path / "back").kv_scales()["model.layers.0.self_attn"]
    assert (round(scales.k, 6), round(scales.v, 6)) == (0.05, 0.08)


def test_per_head_kv_scales_are_refused_by_modelopt(tmp_path: Path, capsys: Any) -> None:
    run(capsys, "convert", modelopt_nvfp4(tmp_path / "source"), tmp_path / "ct", "--to", "compressed-tensors")
    tensors = {n: (t.dtype, t.shape, t.data) for n, t in stored_tensors(tmp_path / "ct").items()}
    tensors["model.layers.0.self_attn.k_scale"] = ("F32", (2, 1, 1), f32(1.0, 2.0))
    write_safetensors(tmp_path / "ct" / "model.safetensors", tensors, {"format": "pt"})
    status, report = run(capsys, "convert", tmp_path / "ct", tmp_path / "out", "--to", "modelopt")
    assert status == 2
    assert report["error"]["tensor"] == "model.layers.0.self_attn.k_scale"


@pytest.mark.fault("B98")
def test_b98_a_k_that_is_no_multiple_of_16_is_named_before_work(tmp_path: Path, capsys: Any) -> None:
    shapes = {"model.layers.0.mlp.up_proj": (16, 64), "model.layers.0.mlp.down_proj": (64, 40)}
    source = plain_bf16(tmp_path / "source", shapes)
    status, report = run(capsys, "quantize", source, tmp_path / "out", "--recipe", "nvfp4")
    assert status == 2
    assert report["error"]["tensor"] == "model.layers.0.mlp.down_proj"
    assert "[64, 40]" in report["error"]["seen"]
    assert "multiple of 16" in report["error"]["accepted"]
    assert "--skip" in report["error"]["fix"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

    status, report = run(capsys, "quantize", source, tmp_path / "out", "--recipe", "nvfp4", "--skip")
    assert status == 0
    assert any("down_proj" in text for text in report["warnings"])
    schemes = {name: module.scheme for name, module in open_checkpoint(tmp_path / "out").modules.items()}
    assert schemes == {"model.layers.0.mlp.up_proj": "nvfp4", "model.layers.0.mlp.down_proj": "bf16"}


@pytest.mark.fault("B42")
@pytest.mark.fault("B06")
def test_stacked_experts_become_one_module_each(tmp_path: Path, capsys: Any) -> None:
    """B42, B06: gate_up_proj [E, 2I, K] of the main layers and per-expert tensors of mtp, in one file."""
    count = 2 * 64 * 32
    words = struct.pack(f"<{count}H", *(0x3C00 + place % 0x2FF for place in range(count)))
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {
        "model.layers.0.mlp.experts.gate_up_proj": ("BF16", (2, 64, 32), words),
        "model.layers.0.mlp.experts.down_proj": ("BF16", (2, 32, 32), words[: 2 * 2 * 32 * 32]),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (32, 32), words[:2048]),
    }
    source = tmp_path / "source"
    write_safetensors(source / "model.safetensors", tensors, {"format": "pt"})
    write_json(source / "config.json", {"model_type": "unheard_of"})
    assert run(capsys, "quantize", source, tmp_path / "out", "--recipe", "nvfp4", "--share-scales")[0] == 0
    stored = stored_tensors(tmp_path / "out")
    base = "model.layers.0.mlp.experts"
    assert stored["mtp.layers.0.mlp.experts.0.up_proj.weight"].data == words[:2048]
    assert f"{base}.gate_up_proj" not in stored
    for expert in (0, 1):
        gate, up = (stored[f"{base}.{expert}.{half}_proj.weight_scale_2"] for half in ("gate", "up"))
        assert gate == up
        before = open_checkpoint(source).read(f"{base}.{expert}.down_proj").dequantize()
        after = open_checkpoint(tmp_path / "out").read(f"{base}.{expert}.down_proj").dequantize()
        assert float((before - after).abs().max()) <= float(before.abs().max()) / 5
    config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert config["quantization"]["quant_algo"] == "W4A16_NVFP4"
    # Nothing to do for the stacked tensor where it stays plain: it is copied as it is.
    assert run(capsys, "convert", source, tmp_path / "plain", "--to", "plain:bf16")[0] == 0
    assert stored_tensors(tmp_path / "plain") == stored_tensors(source)
