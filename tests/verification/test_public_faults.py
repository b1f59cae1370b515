"""Entries of the list of public failures about values and declarations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_checkpoints import Tiny
from verify_cases import CASES
from verify_tools import DOWN, EXPERT, GATE, UP, found, run

MOE = "qwen3_5_moe"


def _codes(folder: Path) -> list[str]:
    return sorted({finding.code for finding in run(folder).findings})


@pytest.mark.fault("B01")
@pytest.mark.parametrize("convention", ["modelopt", "compressed"])
def test_an_inverted_global_scale_is_doubted_and_proved_by_the_reference(
    convention: str, tmp_path: Path
) -> None:
    tiny = Tiny.modelopt() if convention == "modelopt" else Tiny.compressed()
    name = f"{DOWN}.{'weight_scale_2' if convention == 'modelopt' else 'weight_global_scale'}"
    tiny.tensors[name] = 1 / tiny.tensors[name]
    reference = Tiny.plain_model().save(tmp_path / "reference")
    report = run(tiny.save(tmp_path / "model"), against=reference)
    assert [f.tensor for f in found(report, "reciprocal-scale")] == [name]
    codes = "weight" if convention == "modelopt" else "weight_packed"
    assert [f.tensor for f in found(report, "different-weight")] == [f"{DOWN}.{codes}"]


@pytest.mark.fault("B01")
def test_inverted_input_scales_are_doubted_where_all_are(tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    names = [name for name in tiny.tensors if name.endswith("input_scale")]
    for name in names:
        tiny.tensors[name] = 1 / tiny.tensors[name]
    report = run(tiny.save(tmp_path / "model"))
    assert sorted(f.tensor for f in found(report, "reciprocal-scale")) == sorted(names)


def test_one_layer_with_inputs_in_the_thousands_is_not_doubted(tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    tiny.tensors[f"{DOWN}.input_scale"] = torch.tensor(7.4)
    assert run(tiny.save(tmp_path / "model")).findings == ()


@pytest.mark.fault("B03")
def test_missing_input_scales_are_listed_per_expert(tmp_path: Path) -> None:
    tiny = Tiny.modelopt("NVFP4", MOE)
    other = "model.layers.1.mlp.experts.4.up_proj"
    for module in (EXPERT, other):
        del tiny.tensors[f"{module}.input_scale"]
    report = run(tiny.save(tmp_path / "model"))
    assert [(f.code, f.tensor) for f in report.findings] == [
        ("missing-activation-scale", f"{EXPERT}.input_scale"),
        ("missing-activation-scale", f"{other}.input_scale"),
    ]


@pytest.mark.fault("B04")
@pytest.mark.parametrize("part", [DOWN, "model.layers.0.self_attn.k_proj"])
def test_a_missing_weight_scale_names_module_and_accepted_names(part: str, tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    del tiny.tensors[f"{part}.weight_scale_2"]
    findings = found(run(tiny.save(tmp_path / "model")), "unread-tensor")
    assert {f.tensor.rpartition(".")[0] for f in findings} == {part}
    assert f"needs '{part}.weight_scale_2', which is missing" in findings[0].seen


@pytest.mark.fault("B05")
def test_fused_parts_with_other_scales_state_the_error_of_the_largest(tmp_path: Path) -> None:
    tiny = Tiny.modelopt("W4A16_NVFP4")
    tiny.tensors[f"{GATE}.weight_scale_2"] = torch.tensor(1 / 256)
    tiny.tensors[f"{UP}.weight_scale_2"] = torch.tensor(1 / 384)
    (finding,) = run(tiny.save(tmp_path / "model")).findings
    assert (finding.code, finding.tensor) == ("fused-scales-differ", UP)
    assert "gate_proj 0.00390625" in finding.seen
    assert "relative error 0.5" in finding.seen


@pytest.mark.fault("B05")
def test_experts_are_compared_each_for_itself(tmp_path: Path) -> None:
    tiny = Tiny.compressed(MOE)
    experts = "model.layers.0.mlp.experts"
    for number in range(6):
        for part in ("gate", "up"):
            scale = tiny.tensors[f"{experts}.{number}.{part}_proj.weight_global_scale"]
            tiny.tensors[f"{experts}.{number}.{part}_proj.weight_global_scale"] = scale * (1 + number)
    tiny.tensors[f"{experts}.3.up_proj.weight_global_scale"] *= 10
    (finding,) = found(run(tiny.save(tmp_path / "model")), "fused-scales-differ")
    assert finding.tensor == f"{experts}.3.up_proj"
    assert "relative error 9" in finding.seen


@pytest.mark.fault("B07")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_dead_experts_infinite_input_scale_is_an_error(value: float, tmp_path: Path) -> None:
    tiny = Tiny.compressed(MOE)
    name = f"{EXPERT}.input_global_scale"
    tiny.tensors[name] = torch.tensor([value])
    (finding,) = run(tiny.save(tmp_path / "model")).findings
    assert (finding.severity, finding.code, finding.tensor) == ("error", "scale-not-finite", name)
    assert finding.seen == repr(value)
    assert finding.expected == "finite and above zero"


@pytest.mark.fault("B16")
def test_an_fp8_tensor_without_a_known_scale_is_an_error_also_where_it_is_waived(tmp_path: Path) -> None:
    tiny = Tiny.plain_model("qwen3_5")
    tiny.tensors["mtp.fc.weight"] = torch.ones(8, 16).to(torch.float8_e4m3fn)
    (finding,) = run(tiny.save(tmp_path / "model")).findings
    assert (finding.code, finding.tensor) == ("unscaled-fp8", "mtp.fc.weight")


@pytest.mark.fault("B17")
def test_swapped_nibbles_are_another_weight(tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    codes = tiny.tensors[f"{DOWN}.weight"]
    tiny.tensors[f"{DOWN}.weight"] = (codes << 4) | (codes >> 4)
    reference = Tiny.plain_model().save(tmp_path / "reference")
    report = run(tiny.save(tmp_path / "model"), against=reference)
    assert [(f.code, f.tensor) for f in report.findings] == [("different-weight", f"{DOWN}.weight")]


@pytest.mark.fault("B18")
def test_unquantized_b_and_a_beside_a_quantized_qkv_and_z_are_no_fault(tmp_path: Path) -> None:
    assert run(Tiny.modelopt("FP8", "qwen3_5").save(tmp_path / "model")).findings == ()


@pytest.mark.fault("B19")
@pytest.mark.parametrize("with_mtp", [False, True])
def test_norms_that_were_shifted_are_named_and_the_gated_norm_is_not(with_mtp: bool, tmp_path: Path) -> None:
    tiny = Tiny.plain_model("qwen3_5")
    norms = [n for n in tiny.tensors if "norm" in n and "linear_attn" not in n]
    if with_mtp:
        tiny.tensors["mtp.norm.weight"] = torch.zeros(32).bfloat16()
    for name in norms:
        tiny.tensors[name] = torch.zeros_like(tiny.tensors[name])
    assert run(tiny.save(tmp_path / "zero")).findings == ()
    for name in norms:
        tiny.tensors[name] = tiny.tensors[name] + 1
    report = run(tiny.save(tmp_path / "one"))
    assert {(f.code, f.seen) for f in report.findings} == {("shifted-norm", "mean 1")}
    assert sorted(f.tensor for f in report.findings) == sorted(norms)


def test_one_large_gain_is_not_doubted(tmp_path: Path) -> None:
    tiny = Tiny.plain_model("qwen3_5")
    tiny.tensors["model.norm.weight"] = torch.ones(32).bfloat16()
    assert run(tiny.save(tmp_path / "model")).findings == ()


@pytest.mark.fault("B23")
def test_a_lone_kv_scale_says_which_one_is_missing(tmp_path: Path) -> None:
    (finding, *_) = found(run(CASES["lone-kv-scale"].make(tmp_path / "model")), "lone-kv-scale")
    assert "no k_scale for model.layers.0.self_attn" in finding.seen


@pytest.mark.fault("B40")
def test_an_mtp_block_in_bf16_that_nothing_excludes_is_a_disagreement_not_an_error(tmp_path: Path) -> None:
    tiny = Tiny.modelopt("NVFP4", "qwen3_5", ignore=["lm_head", "mtp.layers.0*"])
    tiny.tensors["mtp.fc.weight"] = torch.ones(32, 64).bfloat16()
    tiny.tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(32, 64).bfloat16()
    findings = [f for f in run(tiny.save(tmp_path / "model")).findings if f.tensor.startswith("mtp")]
    assert [(f.severity, f.code, f.tensor) for f in findings] == [("warning", "declared-differs", "mtp.fc")]


@pytest.mark.fault("B48")
def test_an_ignored_module_that_is_packed_all_the_same_is_named_with_both_facts(tmp_path: Path) -> None:
    tiny = Tiny.compressed()
    tiny.config["quantization_config"]["ignore"].append(DOWN)
    (finding,) = run(tiny.save(tmp_path / "model")).findings
    assert (finding.severity, finding.code, finding.tensor) == ("warning", "declared-differs", DOWN)
    assert "ignore" in finding.seen
    assert "nvfp4 (weight_packed U8" in finding.seen


@pytest.mark.fault("B49")
def test_a_stale_ignore_entry_names_what_is_nearest(tmp_path: Path) -> None:
    tiny = Tiny.compressed("qwen3_5")
    tiny.tensors["model.visual.blocks.0.weight"] = torch.ones(8, 8).bfloat16()
    tiny.config["quantization_config"]["ignore"] += ["re:visual.*", "re:model.visual.*", "lm_haed"]
    findings = found(run(tiny.save(tmp_path / "model")), "stale-entry")
    assert [(f.tensor, f.expected) for f in findings] == [
        ("re:visual.*", "the nearest name is 'model.visual'"),
        ("lm_haed", "the nearest name is 'lm_head'"),
    ]


@pytest.mark.fault("B53")
def test_a_tied_head_that_repeats_the_embeddings_is_no_fault(tmp_path: Path) -> None:
    tiny = Tiny.plain_model()
    tiny.config["tie_word_embeddings"] = True
    tiny.tensors["lm_head.weight"] = tiny.tensors["model.embed_tokens.weight"].clone()
    assert run(tiny.save(tmp_path / "same")).findings == ()
    tiny.tensors["lm_head.weight"][7, 3] += 0.01
    (finding,) = run(tiny.save(tmp_path / "other")).findings
    assert finding.code == "tied-but-different"
    assert "1 of 40 rows differ" in finding.seen


@pytest.mark.fault("B54")
@pytest.mark.parametrize("shape", [[], [1]])
def test_scalar_scales_of_experts_may_have_either_shape(shape: list[int], tmp_path: Path) -> None:
    tiny = Tiny.compressed(MOE)
    for name, tensor in tiny.tensors.items():
        if name.endswith("global_scale"):
            tiny.tensors[name] = tensor.reshape(shape)
    assert run(tiny.save(tmp_path / "model")).findings == ()


@pytest.mark.fault("B54")
def test_a_scalar_scale_of_two_values_is_refused_with_its_shape(tmp_path: Path) -> None:
    tiny = Tiny.compressed(MOE)
    tiny.tensors[f"{EXPERT}.input_global_scale"] = torch.ones(2)
    findings = found(run(tiny.save(tmp_path / "model")), "unread-tensor")
    assert f"{EXPERT}.input_global_scale" in {f.tensor for f in findings}
    assert "F32 [2]" in findings[0].seen


@pytest.mark.fault("B97")
@pytest.mark.parametrize(
    ("scheme", "scales", "count"), [(None, False, 0), ("FP8", True, 0), ("FP8", False, 1)]
)
def test_only_a_declared_cache_without_scales_is_mentioned_and_once(
    scheme: str | None, scales: bool, count: int, tmp_path: Path
) -> None:
    tiny = Tiny.modelopt("NVFP4", kv_cache_scheme=scheme)
    for layer in range(2 if scales else 0):
        for what in ("k", "v"):
            tiny.tensors[f"model.layers.{layer}.self_attn.{what}_proj.{what}_scale"] = torch.tensor(0.02)
    report = run(tiny.save(tmp_path / "model"))
    assert [f.code for f in report.findings] == ["missing-kv-scale"] * count


def test_every_convention_that_refuses_the_configuration_is_named(tmp_path: Path) -> None:
    tiny = Tiny.modelopt("NOTHING")
    tiny.config["compression_config"] = {
        "quant_method": "compressed-tensors",
        "format": "of-nobody",
        "config_groups": 3,
    }
    one = Tiny.modelopt("NOTHING").save(tmp_path / "one")
    assert [f.code for f in run(one).findings] == ["refused-declaration"]
    findings = run(tiny.save(tmp_path / "model")).findings
    assert [f.code for f in findings] == ["refused-declaration"] * 2
    assert "NOTHING" in findings[0].seen + findings[1].seen


def test_inverted_cache_scales_and_row_scales_are_doubted(tmp_path: Path) -> None:
    tiny = Tiny.modelopt("NVFP4", kv_cache_scheme="FP8")
    names = [
        f"model.layers.{layer}.self_attn.{what}_proj.{what}_scale" for layer in range(2) for what in "kv"
    ]
    for name in names:
        tiny.tensors[name] = torch.tensor(50.0)
    report = run(tiny.save(tmp_path / "cache"))
    assert sorted((f.code, f.tensor) for f in report.findings) == [
        ("reciprocal-scale", name) for name in names
    ]

    tiny = Tiny.modelopt("FP8_PER_CHANNEL_PER_TOKEN")
    for name in list(tiny.tensors):
        if name.endswith(("input_scale", "weight_scale_2")):
            del tiny.tensors[name]
    codes = [name for name, tensor in tiny.tensors.items() if tensor.dtype == torch.uint8]
    for name in codes:
        rows = tiny.plain[name].float()
        scale = rows.abs().amax(1) / 448
        tiny.tensors[name] = (rows / scale[:, None]).to(torch.float8_e4m3fn)
        tiny.tensors[name.replace("weight", "weight_scale")] = scale
    assert run(tiny.save(tmp_path / "rows")).findings == ()
    name = f"{DOWN}.weight_scale"
    tiny.tensors[name] = 1 / tiny.tensors[name]
    (finding,) = run(tiny.save(tmp_path / "inverted")).findings
    assert (finding.code, finding.tensor) == ("reciprocal-scale", name)
