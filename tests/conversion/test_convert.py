"""Fates, refusals and values of `convert` over the publishers' files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conversion.stored import modelopt_nvfp4, plain_bf16, run, stored_tensors
from vtensors import open_checkpoint

# source, --to, expected scheme of the quantised modules.
SAME_VALUES = [
    ("qwen35-transformers-fp8block", "modelopt"),
    ("qwen35-transformers-fp8block", "compressed-tensors"),
    ("qwen35-modelopt-fp8-block", "hf-fp8"),
    ("qwen35-modelopt-fp8-block", "compressed-tensors"),
    ("qwen35-llmcompressor-fp8block", "hf-fp8"),
    ("qwen35-modelopt-mxfp8", "compressed-tensors"),
    ("qwen35-llmcompressor-fp8static-kvfp8", "modelopt"),
    ("qwen35-modelopt-fp8-pcpt", "compressed-tensors"),
    ("qwen35-llmcompressor-fp8dynamic", "modelopt"),
    ("qwen35-modelopt-fp8", "compressed-tensors"),
    ("qwen35-modelopt-fp8", "hf-fp8"),
    ("qwen35vl-modelopt-mixed-w4a16mlp-fp8attn", "plain:f32"),
    ("qwen35moe-llmcompressor-fp8dynamic", "plain:f32"),
]


@pytest.mark.parametrize(("name", "to"), SAME_VALUES)
def test_respelled_and_widened_weights_have_the_same_values(
    name: str, to: str, shared: Path, tmp_path: Path, capsys: Any
) -> None:
    source = shared / "checkpoints" / name
    status, _ = run(capsys, "convert", source, tmp_path / "out", "--to", to)
    assert status == 0
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert after.accounting.problems == after.conflicts == ()
    assert before.modules.keys() == after.modules.keys()
    for module in before.modules:
        wanted = before.read(module).dequantize(torch.float32)
        assert torch.equal(after.read(module).dequantize(torch.float32), wanted), module


def test_plain_bf16_is_the_value_rounded_once(shared: Path, tmp_path: Path, capsys: Any) -> None:
    source = shared / "checkpoints" / "qwen35-modelopt-nvfp4"
    assert run(capsys, "convert", source, tmp_path / "out", "--to", "plain:bf16")[0] == 0
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert not any("quant" in key for key in after.config)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    for module in before.modules:
        wanted = before.read(module).dequantize(torch.bfloat16)
        assert torch.equal(after.read(module).dequantize(torch.bfloat16), wanted), module


def test_a_pre_scale_is_multiplied_into_a_plain_weight(shared: Path, tmp_path: Path, capsys: Any) -> None:
    source = shared / "checkpoints" / "qwen35-modelopt-nvfp4-awqlite"
    status, report = run(capsys, "convert", source, tmp_path / "out", "--to", "plain:f32")
    assert status == 0
    assert sum("multiplied into the weight" in text for text in report["left_out"]) == 8
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for name, module in before.modules.items():
        weight: Any = before.read(name)
        wanted = weight.dequantize(torch.float32)
        if "pre_scale" in module.claim.roles:
            wanted = wanted * weight.pre_scale.float()
        assert torch.equal(after.read(name).dequantize(torch.float32), wanted), name


@pytest.mark.parametrize(
    ("name", "to", "field"),
    [
        ("qwen35-modelopt-nvfp4-awqlite", "compressed-tensors", "pre_quant_scale"),
        ("qwen35-modelopt-nvfp4", "hf-fp8", "cannot hold this scheme"),
        ("qwen35-modelopt-fp8-pcpt", "hf-fp8", "cannot hold this scheme"),
        ("qwen35-modelopt-nvfp4", "plain", "cannot hold this scheme"),
        ("qwen35-transformers-bf16", "modelopt:nvfp4", "nothing in the checkpoint is quantized"),
        ("qwen35-llmcompressor-fp8dynamic", "modelopt:nvfp4", "rounded a second time"),
        ("qwen35-modelopt-nvfp4", "gptq", "cannot convert to 'gptq'"),
        ("qwen35-modelopt-nvfp4", "unsupported", "it can be read, not written"),
        ("qwen35-modelopt-nvfp4", "modelopt:int4", "cannot hold this scheme"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    name: str, to: str, field: str, shared: Path, tmp_path: Path, capsys: Any
) -> None:
    status, report = run(capsys, "convert", shared / "checkpoints" / name, tmp_path / "out", "--to", to)
    assert status == 2
    assert field in report["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_second_rounding_is_allowed_on_request(shared: Path, tmp_path: Path, capsys: Any) -> None:
    source = shared / "checkpoints" / "qwen35-llmcompressor-fp8dynamic"
    words = ("--to", "hf-fp8:fp8-block", "--allow-requantize")
    status, report = run(capsys, "convert", source, tmp_path / "out", *words)
    assert status == 0
    assert report["fates"]["requantized"] == 25
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for name, module in after.modules.items():
        if module.scheme == "fp8-block":
            wanted = before.read(name).dequantize()
            found = after.read(name).dequantize()
            assert float((found - wanted).norm() / wanted.norm()) < 0.04


def test_experts_stacked_in_bf16_and_vision_stay_as_stored(shared: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("qwen35moe-transformers-bf16fused", "qwen35vl-llmcompressor-nvfp4"):
        source = shared / "checkpoints" / name
        assert run(capsys, "convert", source, tmp_path / name, "--to", "modelopt")[0] == 0
        after = stored_tensors(tmp_path / name)
        for tensor, stored in stored_tensors(source).items():
            if "visual" in tensor or "experts" in tensor:
                assert after[tensor] == stored


def test_a_checkpoint_that_is_the_targets_already_is_copied(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    source = shared / "checkpoints" / "qwen35-modelopt-nvfp4-awqlite"
    assert run(capsys, "convert", source, tmp_path / "out", "--to", "modelopt")[0] == 0
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)
    for name in ("config.json", "hf_quant_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((source / name).read_text())


def test_tokenizer_generation_and_template_files_are_copied(
    shared: Path, tmp_path: Path, capsys: Any
) -> None:
    source = shared / "checkpoints" / "qwen35-llmcompressor-nvfp4"
    _, report = run(capsys, "convert", source, tmp_path / "out", "--to", "modelopt")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert any("recipe.yaml" in text for text in report["left_out"])
    assert not (tmp_path / "out" / "recipe.yaml").exists()


def test_input_scales_of_weight_only_modules_are_kept_or_left_out_by_name(
    tmp_path: Path, capsys: Any
) -> None:
    source = modelopt_nvfp4(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W4A16_NVFP4"
    (source / "config.json").write_text(json.dumps(config))
    run(capsys, "convert", source, tmp_path / "kept", "--to", "compressed-tensors")
    kept = {name for name in stored_tensors(tmp_path / "kept") if name.endswith("input_global_scale")}
    assert len(kept) == 3
    words = ("--to", "compressed-tensors", "--drop-unused-scales")
    _, report = run(capsys, "convert", source, tmp_path / "dropped", *words)
    assert not any(name.endswith("input_global_scale") for name in stored_tensors(tmp_path / "dropped"))
    assert sum("input_scale" in text for text in report["left_out"]) == 3


def test_the_config_keeps_every_other_key(shared: Path, tmp_path: Path, capsys: Any) -> None:
    source = shared / "checkpoints" / "qwen35vl-modelopt-mixed-w4a16mlp-fp8attn"
    run(capsys, "convert", source, tmp_path / "out", "--to", "compressed-tensors")
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    del before["quantization_config"], after["quantization_config"]
    assert after == before


def test_a_checkpoint_that_no_load_accepts_is_not_converted(tmp_path: Path, capsys: Any) -> None:
    source = plain_bf16(tmp_path / "source", {"a.up_proj": (16, 16)})
    raw = (source / "model.safetensors").read_bytes().replace(b'"BF16"', b'"I16" ')
    (source / "model.safetensors").write_bytes(raw)
    status, report = run(capsys, "convert", source, tmp_path / "out", "--to", "modelopt")
    assert status == 2
    assert report["error"]["tensor"] == "a.up_proj"


def test_the_output_passes_verify(shared: Path, tmp_path: Path, capsys: Any) -> None:
    source = shared / "checkpoints" / "qwen35moe-modelopt-moe-mixed-w4a16"
    run(capsys, "convert", source, tmp_path / "out", "--to", "compressed-tensors")
    _, before = run(capsys, "verify", source)
    _, after = run(capsys, "verify", tmp_path / "out")
    errors = [f for f in after["findings"] if f["severity"] == "error"]
    assert errors == []
    assert len(after["findings"]) <= len(before["findings"])


@pytest.mark.parametrize(
    ("name", "command", "words"),
    [
        ("qwen35-transformers-bf16", "quantize", ["--recipe", "nvfp4", "--share-scales"]),
        ("qwen35-transformers-bf16", "quantize", ["--recipe", "fp8-tensor"]),
        ("qwen35-transformers-bf16", "quantize", ["--recipe", "fp8-block"]),
        ("qwen35-transformers-fp8block", "convert", ["--to", "plain:bf16"]),
        ("qwen35-modelopt-fp8-block", "convert", ["--to", "plain:f32"]),
        ("qwen35-llmcompressor-nvfp4a16", "convert", ["--to", "plain:bf16"]),
        ("qwen35-llmcompressor-fp8dynamic", "convert", ["--to", "modelopt:nvfp4", "--allow-requantize"]),
    ],
)
def test_a_few_rows_at_a_time_give_the_same_bytes(
    name: str,
    command: str,
    words: list[str],
    shared: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = shared / "checkpoints" / name
    assert run(capsys, command, source, tmp_path / "whole", *words)[0] == 0
    monkeypatch.setattr("vtensors.conversion.writing.WINDOW_BYTES", 1)
    assert run(capsys, command, source, tmp_path / "windows", *words)[0] == 0
    assert stored_tensors(tmp_path / "windows") == stored_tensors(tmp_path / "whole")


def test_copying_needs_no_torch(tmp_path: Path) -> None:
    source = modelopt_nvfp4(tmp_path / "source", kv=True)
    program = (
        "import sys; from vtensors.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 10 * any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "compressed-tensors"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert stored_tensors(tmp_path / "out")
