"""Prompts longer than a chunk of the delta rule, whole, cut in odd places, and token by token."""

from __future__ import annotations

import pytest
import torch

from tiny_decoders import CONFIGS, tiny_config, tiny_model
from vtensors_plugins.architectures.models.decoder import Decoder

TOKENS = torch.randint(0, 40, (200,), generator=torch.Generator().manual_seed(4))


def _farthest(model: Decoder, pieces: list[int]) -> float:
    """Of the largest logit: how far the rows behind each piece are from those of the whole prompt."""
    whole, state, end, most = model.logits(TOKENS[None])[0], model.new_state(), 0, 0.0
    for piece in pieces:
        row = model.step(TOKENS[end : end + piece], state)
        end += piece
        most = max(most, float((row - whole[end - 1]).abs().max()))
    assert end == len(TOKENS)
    return most / float(whole.abs().max())


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("pieces", [[77, 64, 59], [63, 1, 1, 64, 65, 6], [1, 2, 3, 4, 190], [128, 64, 8]])
def test_a_prompt_cut_anywhere_gives_the_logits_of_the_whole(family: str, pieces: list[int]) -> None:
    assert _farthest(tiny_model(tiny_config(family)), pieces) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("value_heads", [4, 6])
def test_token_by_token_gives_the_logits_of_the_chunked_prompt(family: str, value_heads: int) -> None:
    model = tiny_model(tiny_config(family, linear_num_value_heads=value_heads))
    assert _farthest(model, [1] * len(TOKENS)) <= 1e-5
