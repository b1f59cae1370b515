"""What each family expects of a checkpoint, and what it refuses by name."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from tiny_decoders import CONFIGS, family_of, tiny_config, tiny_names
from vtensors.errors import ArchitectureError
from vtensors.records import ModelPlan
from vtensors_plugins.architectures import llama, qwen3_5

PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")


def _plan(config: dict[str, Any], names: list[str]) -> ModelPlan:
    plan: ModelPlan = family_of(config).plan(config, names)
    return plan


@pytest.mark.fault("B55")
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_known_prefix_leads_to_the_same_weights(family: str, prefix: str) -> None:
    config = tiny_config(family)
    names = tiny_names(config, prefix)
    plan = _plan(config, names)
    assert {expected.module for expected in plan.weights.values()} == set(names)
    assert plan.weights["layers.1.self_attn.o_proj"].module == f"{prefix}layers.1.self_attn.o_proj"
    assert plan.weights["lm_head"].module == "lm_head"


@pytest.mark.fault("B55")
def test_a_repeated_wrapper_prefix_is_refused_with_the_known_ones() -> None:
    config = tiny_config("qwen3_5")
    names = tiny_names(config, "model.language_model.language_model.")
    with pytest.raises(
        ArchitectureError, match=r"unknown prefix 'model\.language_model\.language_model\.'"
    ) as caught:
        _plan(config, names)
    assert all(repr(prefix) in str(caught.value) for prefix in PREFIXES)


@pytest.mark.fault("B55")
def test_two_prefixes_for_the_same_weights_are_refused() -> None:
    config = tiny_config("qwen3_5")
    with pytest.raises(ArchitectureError, match="two prefixes give the same weights"):
        _plan(config, [*tiny_names(config), "model.language_model.layers.0.mlp.up_proj"])
    with pytest.raises(ArchitectureError, match="two names of the head"):
        _plan(config, [*tiny_names(config), "language_model.lm_head"])


@pytest.mark.parametrize("head", ["lm_head", "model.lm_head", "language_model.lm_head"])
def test_the_head_is_found_under_its_known_names(head: str) -> None:
    config = tiny_config("qwen3_5")
    assert _plan(config, tiny_names(config, head=head)).weights["lm_head"].module == head


def test_shapes_and_parts_of_a_dense_hybrid() -> None:
    config = tiny_config("qwen3_5")
    weights = _plan(config, tiny_names(config)).weights
    shapes = {name: expected.shape for name, expected in weights.items()}
    assert shapes["layers.0.linear_attn.in_proj_qkv"] == (2 * 16 + 48, 32)
    assert shapes["layers.0.linear_attn.in_proj_z"] == (48, 32)
    assert shapes["layers.0.linear_attn.in_proj_a"] == shapes["layers.0.linear_attn.in_proj_b"] == (4, 32)
    assert shapes["layers.0.linear_attn.conv1d"] == (80, 1, 4)
    assert shapes["layers.0.linear_attn.A_log"] == shapes["layers.0.linear_attn.dt_bias"] == (4,)
    assert shapes["layers.0.linear_attn.norm"] == (12,)
    assert shapes["layers.0.linear_attn.out_proj"] == (32, 48)
    assert shapes["layers.1.self_attn.q_proj"] == (2 * 64, 32)
    assert shapes["layers.1.self_attn.k_proj"] == (32, 32)
    assert shapes["layers.1.self_attn.o_proj"] == (32, 64)
    assert shapes["layers.1.self_attn.k_norm"] == (16,)
    assert shapes["layers.1.mlp.down_proj"] == (32, 48)
    assert shapes["embed_tokens"] == shapes["lm_head"] == (40, 32)
    assert weights["layers.1.self_attn.q_proj"].part == "attention"
    assert weights["layers.0.linear_attn.out_proj"].part == "linear_attention"
    assert weights["layers.0.linear_attn.norm"].part == "norm"
    assert weights["layers.1.mlp.up_proj"].layer == 1
    assert weights["norm"].layer is None


def test_experts_are_expected_one_by_one() -> None:
    config = tiny_config("qwen3_5_moe")
    weights = _plan(config, tiny_names(config)).weights
    assert weights["layers.1.mlp.experts.5.down_proj"].module == "model.layers.1.mlp.experts.5.down_proj"
    assert weights["layers.1.mlp.experts.5.down_proj"].shape == (32, 16)
    assert weights["layers.1.mlp.experts.5.gate_proj"].part == "experts"
    assert weights["layers.0.mlp.gate"].shape == (6, 32)
    assert weights["layers.0.mlp.gate"].part == "router"
    assert weights["layers.0.mlp.shared_expert_gate"].shape == (1, 32)
    assert weights["layers.0.mlp.shared_expert.up_proj"].part == "shared_expert"
    assert "layers.0.mlp.up_proj" not in weights


@pytest.mark.parametrize("family", CONFIGS)
def test_a_missing_field_is_refused_by_name(family: str) -> None:
    may_be_absent = {"model_type", "hidden_act", "tie_word_embeddings", "rope_parameters"}
    if family == "llama":
        may_be_absent.add("head_dim")  # Llama 2 and 3 leave it out
    for field in set(CONFIGS[family]) - may_be_absent:
        config = tiny_config(family, **{field: None})
        with pytest.raises(ArchitectureError, match=f"{field} is missing"):
            _plan(config, [])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_field_of_another_kind_is_refused_by_name(family: str) -> None:
    for field in ("hidden_size", "num_hidden_layers", "vocab_size"):
        for value in ("32", 0, -1, 1.5, True):
            with pytest.raises(ArchitectureError, match=f"{field} is not supported"):
                _plan(tiny_config(family, **{field: value}), [])


def test_rope_fields_are_found_in_either_place_and_missing_ones_named() -> None:
    inside = tiny_config("qwen3_5")
    beside = tiny_config("qwen3_5", rope_parameters=None, rope_theta=10000.0, partial_rotary_factor=0.5)
    assert qwen3_5.read_config(beside) == qwen3_5.read_config(inside)
    with pytest.raises(ArchitectureError, match="partial_rotary_factor is missing"):
        qwen3_5.read_config(tiny_config("qwen3_5", rope_parameters={"rope_theta": 1e7}))
    with pytest.raises(ArchitectureError, match="rope_theta is missing"):
        qwen3_5.read_config(tiny_config("qwen3_5", rope_parameters={"partial_rotary_factor": 0.5}))


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({}, {"type": "yarn", "factor": 4.0}),
        ({}, {"rope_theta": 5.0}),
        ({"rope_type": "llama3", "factor": 8.0}, {"rope_type": "llama3", "factor": 4.0}),
    ],
)
def test_two_rope_descriptions_that_contradict_each_other_are_refused(
    parameters: dict[str, Any], scaling: dict[str, Any]
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    config = tiny_config("llama", rope_parameters=rope, rope_scaling=scaling)
    with pytest.raises(ArchitectureError, match=r"in rope_parameters, .* in rope_scaling"):
        llama.read_config(config)


def test_a_rope_description_that_stands_in_both_places_is_one() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    both = tiny_config("llama", rope_parameters=rope, rope_scaling={"type": "default", "rope_theta": 1e4})
    assert llama.read_config(both) == llama.read_config(tiny_config("llama", rope_parameters=rope))


def test_a_rotary_embedding_per_kind_of_layer_is_refused() -> None:
    config = tiny_config("llama", rope_theta=1e4, rope_parameters={"full_attention": {"rope_theta": 5.0}})
    with pytest.raises(ArchitectureError, match="full_attention"):
        llama.read_config(config)


@pytest.mark.parametrize("where", ["top", "text"])
def test_a_tied_flag_that_is_no_flag_is_refused(where: str) -> None:
    config = tiny_config("llama")
    config["tie_word_embeddings"] = "yes"
    if where == "top":
        config = {"tie_word_embeddings": "yes", "text_config": tiny_config("llama")}
    with pytest.raises(ArchitectureError, match="tie_word_embeddings"):
        llama.read_config(config)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_an_unknown_rope_type_is_refused_by_name(key: str) -> None:
    config = tiny_config(
        "llama", rope_parameters=None, rope_theta=1e4, rope_scaling={key: "yarn", "factor": 4.0}
    )
    with pytest.raises(ArchitectureError, match="rope_type is not supported") as caught:
        llama.read_config(config)
    assert "yarn" in str(caught.value)


def test_a_nested_text_config_is_read_like_a_flat_one() -> None:
    flat = tiny_config("qwen3_5")
    nested = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": flat,
    }
    assert family_of(nested) is qwen3_5
    assert qwen3_5.read_config(nested) == qwen3_5.read_config(flat)
    assert qwen3_5.read_config(nested | {"tie_word_embeddings": True}).tied


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3_5", "attention_k_eq_v", True),
        ("qwen3_5", "output_gate_type", "sigmoid"),
        ("qwen3_5", "attn_output_gate", False),
        ("qwen3_5", "hidden_act", "gelu"),
        ("qwen3_5", "num_attention_heads", 3),
        ("qwen3_5", "linear_num_value_heads", 3),
        ("qwen3_5_moe", "norm_topk_prob", False),
        ("qwen3_5_moe", "mlp_only_layers", [0]),
        ("qwen3_5_moe", "num_experts_per_tok", 7),
        ("qwen3", "use_sliding_window", True),
        ("qwen3", "attention_k_eq_v", True),
        ("llama", "attention_k_eq_v", True),
        ("llama", "attention_bias", "yes"),
    ],
)
@pytest.mark.fault("B52")
def test_a_variant_that_is_not_supported_is_refused_by_name(family: str, field: str, value: object) -> None:
    with pytest.raises(ArchitectureError, match=f"{field} is not supported"):
        _plan(tiny_config(family, **{field: value}), [])


def test_layer_types_must_be_known_and_as_many_as_layers() -> None:
    with pytest.raises(ArchitectureError, match=r"layer_types\[1\]"):
        _plan(tiny_config("qwen3_5", layer_types=["linear_attention", "sliding_attention"]), [])
    with pytest.raises(ArchitectureError, match="layer_types is not supported"):
        _plan(tiny_config("qwen3_5", layer_types=["linear_attention"]), [])


def test_without_layer_types_every_nth_layer_is_a_full_attention() -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    listed = tiny_config("qwen3_5", num_hidden_layers=6, layer_types=kinds, full_attention_interval=2)
    counted = {name: value for name, value in listed.items() if name != "layer_types"}
    counted["full_attention_interval"] = 3
    names = tiny_names(listed)
    assert _plan(counted, names).weights == _plan(listed, names).weights
    with pytest.raises(ArchitectureError, match="full_attention_interval is not supported"):
        _plan({**counted, "full_attention_interval": 0}, names)
    del counted["full_attention_interval"]
    with pytest.raises(ArchitectureError, match="layer_types is missing"):
        _plan(counted, names)


@pytest.mark.fault("B53")
def test_a_tied_head_that_is_absent_shares_the_embeddings_and_says_so() -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    plan = _plan(config, tiny_names(config, head=None))
    assert "lm_head" not in plan.weights
    assert plan.notes == ()


@pytest.mark.fault("B53")
def test_a_tied_head_in_the_file_is_used_and_said_so() -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    plan = _plan(config, tiny_names(config))
    assert plan.weights["lm_head"].module == "lm_head"
    assert "the file's head is used" in plan.notes[0]


@pytest.mark.fault("B53")
def test_an_untied_head_is_required() -> None:
    config = tiny_config("qwen3")
    plan = _plan(config, tiny_names(config, head=None))
    assert plan.weights["lm_head"].required
    assert plan.notes == ()


def test_vision_mtp_and_rotary_tables_are_waived_with_reasons() -> None:
    config = tiny_config("qwen3_5")
    extra = ["model.visual.blocks.0.attn.qkv", "mtp.layers.0.mlp.up_proj", "mtp.embed_tokens"]
    table = "model.layers.1.self_attn.rotary_emb.inv_freq"
    plan = _plan(config, [*tiny_names(config), *extra, table])
    reasons = {
        name: [waiver.reason for waiver in plan.waivers if name.startswith(waiver.prefix)]
        for name in [*extra, table]
    }
    assert reasons[extra[0]] == ["vision tower: text path only"]
    assert reasons[extra[1]] == reasons[extra[2]] == ["multi-token prediction: not used"]
    assert len(reasons[table]) == 1
    assert not any(name.startswith(w.prefix) for w in plan.waivers for name in tiny_names(config))


def test_a_model_of_30000_modules_is_planned_in_half_a_second() -> None:
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10
    config = tiny_config("qwen3_5_moe", num_experts=256, num_hidden_layers=40, layer_types=layers)
    names = tiny_names(config)
    assert len(names) > 30_000

    def seconds() -> float:
        start = time.process_time()
        _plan(config, names)
        return time.process_time() - start

    # The machine may be shared: the best of three.
    assert min(seconds() for _ in range(3)) < 0.5


def test_planning_does_not_import_torch() -> None:
    modules = (
        "architectures.qwen3_5, vtensors_plugins.architectures.qwen3, vtensors_plugins.architectures.llama"
    )
    code = f"import sys, vtensors_plugins.{modules}, vtensors_plugins.backends.reference as r; r.vtensors_kernels()"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
