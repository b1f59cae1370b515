"""Running tiny models: prompt against single tokens, rows, heads, schemes, caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tiny_decoders import CONFIGS, tiny_config, tiny_model, tiny_names, tiny_weights
from vtensors.errors import ArchitectureError, VtensorsError
from vtensors_formats import FP4Activation, PlainWeight, Weight
from vtensors_formats.fp8_quantize import quantize_fp8_tensor
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.reference.linear import linear
from vtensors_plugins.architectures import qwen3_5
from vtensors_plugins.architectures.models.attention import split_gate
from vtensors_plugins.architectures.models.decoder import Decoder

TOKENS = torch.randint(0, 40, (75,), generator=torch.Generator().manual_seed(1))


def _decoded(model: Decoder, tokens: Tensor, pieces: list[int]) -> Tensor:
    """The last logits of each piece."""
    state = model.new_state()
    return torch.stack([model.step(piece, state) for piece in tokens.split(pieces)])


def _close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def _dequantized(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    return {name: PlainWeight(tensor=weight.dequantize(torch.float32)) for name, weight in weights.items()}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 70])
def test_a_prompt_then_single_tokens_equals_the_whole(family: str, prompt: int) -> None:
    model = tiny_model(tiny_config(family))
    tokens = TOKENS[: prompt + 5]
    whole = model.logits(tokens[None])[0]
    _close(_decoded(model, tokens, [prompt, 1, 1, 1, 1, 1]), whole[prompt - 1 :])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_prompt_in_pieces_equals_the_whole(family: str) -> None:
    model = tiny_model(tiny_config(family))
    whole = model.logits(TOKENS[None])[0]
    _close(_decoded(model, TOKENS, [2, 20, 3, 50]), whole[[1, 21, 24, 74]])


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_do_not_see_each_other_and_a_used_state_does_not_leak(family: str) -> None:
    model = tiny_model(tiny_config(family))
    rows = torch.stack((TOKENS[:6], TOKENS[6:12]))
    both = model.logits(rows)
    assert both.shape == (2, 6, 40)
    assert torch.equal(both[1], model.logits(rows[1:])[0])
    assert torch.equal(both[1], model.logits(rows.flip(0))[0])


@pytest.mark.parametrize("family", CONFIGS)
def test_later_tokens_do_not_change_earlier_logits(family: str) -> None:
    model = tiny_model(tiny_config(family))
    changed = TOKENS[:20].clone()
    changed[12:] = 3
    _close(model.logits(changed[None])[0, :12], model.logits(TOKENS[None, :20])[0, :12])


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_stays_near_float32(family: str) -> None:
    config = tiny_config(family)
    weights = tiny_weights(config)
    rounded: dict[str, Weight] = {
        name: PlainWeight(tensor=weight.dequantize(torch.bfloat16)) for name, weight in weights.items()
    }
    wide = tiny_model(config, rounded).logits(TOKENS[None, :12])
    narrow = tiny_model(config, rounded, dtype=torch.bfloat16)
    ours = narrow.logits(TOKENS[None, :12])
    assert ours.dtype == torch.bfloat16
    assert narrow.step(TOKENS[:3], narrow.new_state()).dtype == torch.bfloat16
    assert float((ours.float() - wide).abs().max()) < 0.1 * float(wide.abs().max())


def test_the_model_tells_what_the_engine_asks() -> None:
    config = tiny_config("qwen3_5")
    model = tiny_model(config)
    assert (model.vocab_size, model.num_layers, model.max_positions) == (40, 2, 256)
    assert model.device == torch.device("cpu")
    assert model.step(TOKENS[:3], model.new_state()).shape == (40,)
    linears = [selected for selected in model.selected if selected.op == "linear"]
    assert {selected.kernel for selected in linears} == {"linear_reference"}
    assert {"lm_head", "layers.1.self_attn.q_proj"} <= {selected.module for selected in linears}


def test_b18_gdn_projections_of_several_schemes_equal_their_dequantized_ones() -> None:
    config = tiny_config("qwen3_5")
    weights = tiny_weights(config)
    for name in ("in_proj_qkv", "in_proj_z"):
        place = f"layers.0.linear_attn.{name}"
        weights[place] = quantize_fp8_tensor(weights[place].dequantize(torch.float32))
    expected = tiny_model(config, _dequantized(weights)).logits(TOKENS[None, :9])
    _close(tiny_model(config, weights).logits(TOKENS[None, :9]), expected)


def test_b19_zero_norms_are_gain_one_with_and_without_mtp_tensors() -> None:
    config = tiny_config("qwen3_5")
    weights = tiny_weights(config)
    for name in weights:
        if name.endswith("norm") and "linear_attn" not in name:
            weights[name] = PlainWeight(tensor=torch.zeros(weights[name].shape))
    names = tiny_names(config)
    with_mtp = [*names, "mtp.norm", "mtp.layers.0.input_layernorm", "mtp.pre_fc_norm_hidden"]
    assert qwen3_5.plan(config, with_mtp).weights == qwen3_5.plan(config, names).weights
    h = tiny_model(config, weights).norm(torch.randn(3, 32))
    torch.testing.assert_close(h.square().mean(-1), torch.ones(3), rtol=1e-4, atol=0)


def test_b21_query_and_gate_alternate_per_head() -> None:
    rows = torch.arange(16.0)[None]
    q, gate = split_gate(rows, 2, 4, gated=True)
    assert q.flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert gate is not None
    assert gate.flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


def test_a_closed_gate_silences_attention() -> None:
    config = tiny_config("qwen3_5", layer_types=["full_attention", "full_attention"])
    weights = tiny_weights(config)
    for layer in range(2):
        place = f"layers.{layer}.self_attn.o_proj"
        weights[place] = PlainWeight(tensor=torch.zeros(weights[place].shape))
    silent = tiny_model(config, weights).logits(TOKENS[None, :5])
    # Without attention the logits of a token depend on that token alone.
    assert torch.allclose(
        silent[0, 3], tiny_model(config, weights).logits(TOKENS[None, 3:4])[0, 0], atol=1e-5
    )


def test_quantized_weights_in_every_part_equal_their_dequantized_ones() -> None:
    config = tiny_config("qwen3_5_moe")
    weights = tiny_weights(config)
    for name, weight in weights.items():
        if len(weight.shape) == 2 and weight.shape[1] % 16 == 0:
            weights[name] = quantize_nvfp4(weight.dequantize(torch.float32))
    assert weights["embed_tokens"].scheme == weights["lm_head"].scheme == "nvfp4"
    expected = tiny_model(config, _dequantized(weights)).logits(TOKENS[None, :9])
    _close(tiny_model(config, weights).logits(TOKENS[None, :9]), expected)


def test_only_experts_that_got_a_token_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("qwen3_5_moe")
    model = tiny_model(config)
    moe: Any = model.layers[0].mlp
    asked: list[tuple[int, ...]] = []

    def spy(x: Tensor, weight: Any, activation: Any = None) -> Tensor:
        asked.append(tuple(weight.shape))
        return linear(x, weight, activation)

    x, norm = torch.randn(1, 32), model.layers[0].post_norm
    expected = moe(x, norm)
    monkeypatch.setattr("vtensors_kernels.reference.experts.linear", spy)
    assert torch.equal(moe(x, norm), expected)
    # gate, up and down of two chosen experts and the shared one.
    assert len(asked) == 3 * 3


def test_equal_router_logits_choose_the_lowest_experts() -> None:
    config = tiny_config("qwen3_5_moe")
    weights = tiny_weights(config)
    for layer in range(2):
        weights[f"layers.{layer}.mlp.gate"] = PlainWeight(tensor=torch.zeros(6, 32))
    expected = tiny_model(config, weights).logits(TOKENS[None, :5])
    for name in weights:
        if ".experts." in name and int(name.split(".")[4]) >= 2:
            weights[name] = PlainWeight(tensor=torch.full(weights[name].shape, float("nan")))
    assert torch.equal(tiny_model(config, weights).logits(TOKENS[None, :5]), expected)


@pytest.mark.fault("B53")
@pytest.mark.parametrize("scheme", ["f32", "nvfp4"])
def test_a_tied_head_shares_the_embeddings_in_any_scheme(scheme: str) -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    weights = tiny_weights(config, head=None)
    assert "lm_head" not in weights
    if scheme == "nvfp4":
        weights["embed_tokens"] = quantize_nvfp4(weights["embed_tokens"].dequantize(torch.float32))
    untied = tiny_config("qwen3")
    expected = tiny_model(untied, {**weights, "lm_head": weights["embed_tokens"]})
    model = tiny_model(config, weights)
    assert torch.equal(model.logits(TOKENS[None, :4]), expected.logits(TOKENS[None, :4]))


@pytest.mark.fault("B53")
def test_a_different_head_in_the_file_is_used() -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    weights = tiny_weights(config)
    head = quantize_nvfp4(torch.randn(40, 32))
    model = tiny_model(config, {**weights, "lm_head": head})
    plain = tiny_model(config, {**weights, "lm_head": PlainWeight(tensor=head.dequantize(torch.float32))})
    _close(model.logits(TOKENS[None, :4]), plain.logits(TOKENS[None, :4]))
    assert not torch.allclose(
        model.logits(TOKENS[None, :4]), tiny_model(config, weights).logits(TOKENS[None, :4])
    )


def test_a_weight_that_was_not_loaded_is_named() -> None:
    config = tiny_config("qwen3_5")
    for name in ("lm_head", "layers.1.mlp.up_proj", "layers.0.linear_attn.A_log"):
        weights = tiny_weights(config)
        del weights[name]
        with pytest.raises(ArchitectureError, match=f"{name}: weight is missing"):
            tiny_model(config, weights)


def test_biases_must_be_as_the_config_says() -> None:
    announced = tiny_config("llama", attention_bias=True, mlp_bias=True)
    weights = tiny_weights(announced)
    with pytest.raises(ArchitectureError, match="q_proj: has no bias"):
        tiny_model(announced, weights)
    without = tiny_model(tiny_config("llama"), weights).logits(TOKENS[None, :4])
    for factor in (0.0, 1.0):
        for name, weight in weights.items():
            if name.endswith("_proj"):
                weights[name] = attrs.evolve(weight, bias=factor * torch.ones(weight.shape[0]))
        biased = tiny_model(announced, weights).logits(TOKENS[None, :4])
        assert torch.allclose(biased, without, atol=1e-5) is (factor == 0.0)
    with pytest.raises(ArchitectureError, match="has a bias that config"):
        tiny_model(tiny_config("llama"), weights)


def test_declared_activations_run_only_where_executed_says_so() -> None:
    config = tiny_config("llama")
    weights = tiny_weights(config)
    name = "layers.0.mlp.up_proj"
    activation = FP4Activation(global_scale=torch.tensor(0.002))
    quantized = quantize_nvfp4(weights[name].dequantize(torch.float32))
    weights[name] = attrs.evolve(quantized, activation=activation)
    bare = tiny_model(config, weights | {name: quantized}).logits(TOKENS[None, :4])
    weight_only, declared = tiny_model(config, weights), tiny_model(config, weights, executed={name: "fp4"})
    assert torch.equal(weight_only.logits(TOKENS[None, :4]), bare)
    assert not torch.allclose(declared.logits(TOKENS[None, :4]), bare, atol=1e-3)
    told = {selected.module: (selected.declared, selected.executed) for selected in declared.selected}
    assert told[name] == ("fp4", "fp4")
    assert told["layers.0.mlp.down_proj"] == ("16bit", "16bit")
    with pytest.raises(VtensorsError, match="linear_reference: failed to bind"):
        tiny_model(config, weights, executed={name: "fp8-static"})


def test_an_fp8_cache_holds_e4m3_values_times_their_scales() -> None:
    config = tiny_config("qwen3_5")
    model = tiny_model(config, kv_quant={1: (0.05, 0.08)})
    state = model.new_state()
    model.step(TOKENS[:8], state)
    cache: Any = state.layers[1]
    for stored, scale in ((cache.keys[:, :8], 0.05), (cache.values[:, :8], 0.08)):
        steps = (stored / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(stored, steps, rtol=1e-6, atol=0)
    plain = tiny_model(config)
    exact, near = plain.logits(TOKENS[None, :8]), model.logits(TOKENS[None, :8])
    assert 0 < float((exact - near).abs().max()) < 0.1 * float(exact.abs().max())
