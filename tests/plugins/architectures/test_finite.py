"""VT_DEBUG_NAN: the first part whose output is not finite is named."""

from __future__ import annotations

import pytest
import torch

from tiny_decoders import CONFIGS, tiny_config, tiny_model, tiny_weights
from vtensors.errors import VtensorsError
from vtensors_formats import PlainWeight
from vtensors_plugins.architectures.models.decoder import Decoder
from vtensors_plugins.architectures.models.finite import check_finite

TOKENS = torch.arange(3, 9)

# Weight -> the module that is named and its part.
_PARTS = {
    "embed_tokens": ("embed_tokens", "embedding"),
    "layers.0.linear_attn.A_log": ("layers.0", "mixer"),
    "layers.0.post_attention_layernorm": ("layers.0", "mlp"),
    "layers.1.input_layernorm": ("layers.1", "mixer"),
    "layers.1.self_attn.o_proj": ("layers.1", "mixer"),
    "layers.1.mlp.down_proj": ("layers.1", "mlp"),
    "norm": ("norm", "norm"),
    "lm_head": ("lm_head", "head"),
}


def watched(name: str, value: float) -> Decoder:
    """A model that looks at its parts, with the value throughout a weight."""
    config = tiny_config("qwen3_5")
    weights = tiny_weights(config)
    if name:
        weights[name] = PlainWeight(tensor=torch.full(weights[name].shape, value))
    return tiny_model(config, weights, debug_nan=True)


@pytest.mark.parametrize("name", _PARTS)
def test_the_first_part_that_is_not_finite_is_named_by_a_prompt_a_token_and_logits(name: str) -> None:
    model = watched(name, float("nan"))
    place, part = _PARTS[name]
    for call in (
        lambda: model.step(TOKENS, model.new_state()),
        lambda: model.step(TOKENS[:1], model.new_state()),
        lambda: model.logits(TOKENS[None]),
    ):
        with pytest.raises(VtensorsError, match=f"the {part} is the first part whose output") as caught:
            call()
        assert caught.value.tensor == place


def test_the_counts_of_bad_values_are_told() -> None:
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    x[0, 1], x[1, 2], x[2, 3] = float("nan"), float("inf"), float("-inf")
    with pytest.raises(VtensorsError) as caught:
        check_finite(x, "layers.3", "mlp")
    assert caught.value.seen == "1 NaN and 2 infinite of 12 values, shape [3, 4], torch.bfloat16"
    fine = torch.ones(2)
    assert check_finite(fine, "layers.3", "mlp") is fine


@pytest.mark.parametrize("family", CONFIGS)
def test_looking_changes_nothing(family: str) -> None:
    config = tiny_config(family)
    plain, watching = tiny_model(config), tiny_model(config, debug_nan=True)
    assert watching.debug_nan
    assert torch.equal(plain.logits(TOKENS[None]), watching.logits(TOKENS[None]))


def test_without_the_switch_nobody_looks() -> None:
    config = tiny_config("qwen3_5")
    weights = tiny_weights(config)
    weights["norm"] = PlainWeight(tensor=torch.full(weights["norm"].shape, float("nan")))
    assert bool(tiny_model(config, weights).logits(TOKENS[None]).isnan().all())
