from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparse_checkpoints import Shapes, published_27b, with_head, write_sparse
from vtensors.checkpoint import open_checkpoint
from vtensors.comparison import Comparison, compare
from vtensors.comparison_groups import grouped
from vtensors.config_comparison import compare_configs
from vtensors.module_facts import canonical_name, pattern_of

PLAIN: dict[str, Any] = {"model_type": "of-nobody"}


def nvfp4(n: int = 32, k: int = 64) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        "weight": ("U8", (n, k // 2)),
        "weight_scale": ("F8_E4M3", (n, k // 16)),
        "weight_scale_2": ("F32", ()),
    }


def fp8(scale: tuple[int, ...], dtype: str = "F32") -> dict[str, tuple[str, tuple[int, ...]]]:
    return {"weight": ("F8_E4M3", (32, 64)), "weight_scale": (dtype, scale)}


BF16 = {"weight": ("BF16", (32, 64))}


def shapes(modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]]) -> Shapes:
    return {f"{name}.{suffix}": entry for name, own in modules.items() for suffix, entry in own.items()}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {**PLAIN, "quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, **more}}


def compared(
    folder: Path, before: tuple[Shapes, dict[str, Any]], after: tuple[Shapes, dict[str, Any]]
) -> Comparison:
    one, two = (write_sparse(folder / name, *side) for name, side in (("a", before), ("b", after)))
    return compare(open_checkpoint(one), open_checkpoint(two))


def test_a_checkpoint_is_identical_to_its_copy(tmp_path: Path) -> None:
    side = (shapes({"model.layers.0.mlp.up_proj": nvfp4(), "lm_head": BF16}), modelopt("NVFP4"))
    comparison = compared(tmp_path, side, side)
    assert comparison.identical
    report = comparison.to_json()
    assert report["identical"] is True
    assert report["changed"] == report["added"] == report["removed"] == report["config"] == []
    assert report["unchanged"] == 2


def test_a_head_of_bf16_that_became_fp8_per_row_is_said_exactly(tmp_path: Path) -> None:
    config = modelopt("FP8_PER_CHANNEL_PER_TOKEN")
    comparison = compared(
        tmp_path,
        (shapes({"model.norm": {"weight": ("BF16", (64,))}, "lm_head": BF16}), config),
        (shapes({"model.norm": {"weight": ("BF16", (64,))}, "lm_head": fp8((32,))}), config),
    )
    (group,) = grouped(comparison.modules)
    assert (group.kind, group.pattern, group.headline) == ("changed", "lm_head", "BF16 -> FP8 per row")
    assert "convention plain -> modelopt" in group.details
    assert "scale F32 [32] new" in group.details
    (change,) = comparison.modules.changed
    assert {"scheme", "convention", "tensors", "declared"} <= set(change.what)
    assert (change.before.scheme, change.after.scheme) == ("bf16", "fp8-row")
    entry = comparison.to_json()["changed"][0]
    assert entry["before"]["shape"] == entry["after"]["shape"] == [32, 64]


def test_two_commits_of_the_published_27b_differ_in_the_head_alone(shared: Path, tmp_path: Path) -> None:
    published = published_27b(shared)
    snapshots = tmp_path / "models--nvidia--Qwen3.6-27B-NVFP4" / "snapshots"
    one, two = (
        write_sparse(snapshots / (letter * 40), *with_head(published, scheme))
        for letter, scheme in zip("ab", ("bf16", "fp8-row"), strict=True)
    )
    comparison = compare(open_checkpoint(one), open_checkpoint(two))
    assert comparison.before.repo == comparison.after.repo == "nvidia/Qwen3.6-27B-NVFP4"
    assert (comparison.before.commit, comparison.after.commit) == ("a" * 40, "b" * 40)
    (group,) = grouped(comparison.modules)
    assert (group.pattern, group.headline) == ("lm_head", "BF16 -> FP8 per row")
    assert len(comparison.modules.pairs) - len(comparison.modules.changed) == 1032
    assert not comparison.kv_scales


def test_the_same_change_in_every_layer_is_one_group(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(64)]
    comparison = compared(
        tmp_path,
        (shapes(dict.fromkeys(names, fp8(()))), modelopt("FP8")),
        (shapes(dict.fromkeys(names, fp8((32,)))), modelopt("FP8")),
    )
    (group,) = grouped(comparison.modules)
    assert (group.pattern, len(group.modules)) == ("model.layers.*.mlp.down_proj", 64)
    assert group.headline == "FP8 per tensor -> FP8 per row"
    assert len(comparison.to_json()["changed"]) == 64


def test_another_dtype_of_a_scale_is_a_change_of_its_tensors(tmp_path: Path) -> None:
    comparison = compared(
        tmp_path,
        (shapes({"lm_head": fp8((32,), "BF16")}), modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
        (shapes({"lm_head": fp8((32,), "F32")}), modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    )
    (group,) = grouped(comparison.modules)
    assert group.headline == "scale BF16 [32] -> F32 [32]"
    assert comparison.modules.changed[0].what == ("tensors",)


def test_another_declared_algorithm_over_the_same_tensors_is_a_change(tmp_path: Path) -> None:
    own = shapes({"lm_head": {**nvfp4(), "input_scale": ("F32", ())}})
    comparison = compared(tmp_path, (own, modelopt("NVFP4")), (own, modelopt("W4A16_NVFP4")))
    (change,) = comparison.modules.changed
    assert change.what == ("declared", "algorithm")
    assert (change.before.declared, change.after.declared) == ("fp4", "16bit")


def test_modules_that_came_and_went_are_listed(tmp_path: Path) -> None:
    comparison = compared(
        tmp_path,
        (shapes({"model.layers.0.mlp.up_proj": BF16, "model.layers.1.mlp.up_proj": BF16}), PLAIN),
        (shapes({"model.layers.0.mlp.up_proj": BF16, "mtp.fc": BF16}), PLAIN),
    )
    report = comparison.to_json()
    assert [entry["module"] for entry in report["added"]] == ["mtp.fc"]
    assert [entry["module"] for entry in report["removed"]] == ["model.layers.1.mlp.up_proj"]
    assert report["unchanged"] == 1


def test_another_prefix_dialect_is_another_name_of_the_same_module(tmp_path: Path) -> None:
    comparison = compared(
        tmp_path,
        (shapes({"model.layers.0.mlp.up_proj": BF16, "lm_head": BF16}), PLAIN),
        (shapes({"model.language_model.layers.0.mlp.up_proj": BF16, "language_model.lm_head": BF16}), PLAIN),
    )
    assert comparison.modules.added == comparison.modules.removed == ()
    assert [change.what for change in comparison.modules.changed] == [("name",), ("name",)]
    assert grouped(comparison.modules)[0].headline == "now named model.language_model.layers.*.mlp.up_proj"


def test_stacked_experts_are_the_same_modules_as_single_ones(tmp_path: Path) -> None:
    owner = "model.layers.0.mlp.experts"
    single = {f"{owner}.{e}.{p}": BF16 for e in range(4) for p in ("gate_proj", "up_proj")}
    comparison = compared(
        tmp_path, (shapes(single), PLAIN), ({f"{owner}.gate_up_proj": ("BF16", (4, 64, 64))}, PLAIN)
    )
    assert comparison.modules.added == comparison.modules.removed == ()
    assert {change.what for change in comparison.modules.changed} == {("stacking",)}
    assert [len(group.modules) for group in grouped(comparison.modules)] == [4, 4]


def test_stacked_quantized_experts_differ_from_single_ones_in_their_stacking_alone(tmp_path: Path) -> None:
    owner = "model.layers.0.mlp.experts"
    single = shapes({f"{owner}.{e}.down_proj": nvfp4() for e in range(4)})
    stacked: Shapes = {
        f"{owner}.down_proj": ("U8", (4, 32, 32)),
        f"{owner}.down_proj_weight_scale": ("F8_E4M3", (4, 32, 4)),
        f"{owner}.down_proj_weight_scale_2": ("F32", (4,)),
    }
    comparison = compared(tmp_path, (single, modelopt("NVFP4")), (stacked, modelopt("NVFP4")))
    assert len(comparison.modules.changed) == 4
    assert {change.what for change in comparison.modules.changed} == {("stacking",)}


def test_a_module_that_nobody_reads_is_compared_by_its_tensors(tmp_path: Path) -> None:
    strange = {"lm_head.weight": ("U8", (4, 4)), "lm_head.odd_scale": ("F32", (4,))}
    other = {**strange, "lm_head.odd_scale": ("F32", (2,))}
    comparison = compared(tmp_path, (strange, PLAIN), (other, PLAIN))
    (change,) = comparison.modules.changed
    assert change.before.scheme == change.after.scheme == "unclaimed"
    assert change.what == ("tensors",)


def test_kv_cache_scales_are_compared_apart_from_modules(tmp_path: Path) -> None:
    attention = "model.layers.0.self_attn"
    bare = shapes({f"{attention}.q_proj": BF16})
    scaled = {**bare, f"{attention}.k_scale": ("F32", ()), f"{attention}.v_scale": ("F32", ())}
    comparison = compared(tmp_path, (bare, PLAIN), (scaled, PLAIN))
    assert not comparison.modules
    assert [facts.name for facts in comparison.kv_scales.added] == [attention]
    assert not comparison.identical


def test_statements_tell_producer_algorithm_and_kv_cache(tmp_path: Path) -> None:
    own = shapes({"lm_head": fp8(())})
    before = modelopt("FP8", producer={"name": "modelopt", "version": "0.45.0"})
    after = modelopt("FP8", producer={"name": "modelopt", "version": "0.47.0"}, kv_cache_quant_algo="FP8")
    comparison = compared(tmp_path, (own, before), (own, after))
    said = {statement.what: (statement.before, statement.after) for statement in comparison.statements}
    assert said["declared"] == ("modelopt 0.45.0 FP8", "modelopt 0.47.0 FP8")
    assert said["kv_cache"] == (None, "FP8")
    keys = {change.key for change in comparison.config}
    assert keys == {"quantization_config.producer.version", "quantization_config.kv_cache_quant_algo"}


def test_one_entry_more_in_a_list_of_modules_is_named() -> None:
    before = {"ignore": ["a", "b"], "rope_theta": 1e4, "n": 1}
    after = {"ignore": ["b", "c"], "rope_theta": 1e6, "n": True}
    changes = {change.key: change for change in compare_configs("config.json", before, after)}
    assert (changes["ignore"].added, changes["ignore"].removed) == (("c",), ("a",))
    assert (changes["rope_theta"].before, changes["rope_theta"].after) == (1e4, 1e6)
    assert changes["n"].after is True  # which Python calls equal to 1


def test_a_list_of_modules_in_another_order_says_the_same() -> None:
    assert not list(compare_configs("config.json", {"ignore": ["a", "b"]}, {"ignore": ["b", "a"]}))


def test_a_file_that_is_absent_on_one_side_is_one_change() -> None:
    (change,) = compare_configs("hf_quant_config.json", None, {"quantization": {}})
    assert (change.key, change.missing) == ("", "before")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.17.mlp.experts.3.up_proj", "model.layers.*.mlp.experts.*.up_proj"),
        ("model.visual.blocks.0.attn.qkv2", "model.visual.blocks.*.attn.qkv2"),
        ("lm_head", "lm_head"),
        ("layers.10", "layers.*"),
    ],
)
def test_numbers_between_dots_become_stars(name: str, pattern: str) -> None:
    assert pattern_of(name) == pattern


def test_dialects_of_one_module_share_their_canonical_name() -> None:
    names = ["model.layers.0.x", "model.language_model.layers.0.x", "language_model.model.layers.0.x"]
    assert len({canonical_name(name) for name in names}) == 1
    assert canonical_name("model.visual.x") == "model.visual.x"
