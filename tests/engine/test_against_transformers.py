"""Small random hybrids in transformers and here: logits, pieces of a prompt, greedy tokens, the error of 16 bits.

Every norm, gate and decay is far from the value it starts with, so that none can be left out unseen. Skips where
transformers is not installed; any version from 5.17 on will do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vtensors

transformers = pytest.importorskip("transformers", minversion="5.17")

VOCABULARY = 512
KINDS = [(kind, heads) for kind in ("dense", "moe") for heads in (4, 6)]
each_kind = pytest.mark.parametrize(
    ("kind", "value_heads"), KINDS, ids=[f"{kind}-{heads // 2}" for kind, heads in KINDS]
)
TOKENS = torch.randint(0, VOCABULARY, (1, 200), generator=torch.Generator().manual_seed(2))
Make = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """kind, value_heads, layers, init -> transformers' model in float32 and the folder that it wrote."""
    made: dict[tuple[Any, ...], tuple[Any, Path]] = {}

    def get(kind: str, value_heads: int, layers: int = 4, init: float = 0.02) -> tuple[Any, Path]:
        key = (kind, value_heads, layers, init)
        if key not in made:
            model = _random_model(*key)
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return get


def _random_model(kind: str, value_heads: int, layers: int, init: float) -> Any:
    """Two key heads. All parameters are values of bfloat16, so that no dtype rounds them."""
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 48,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": init,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    # By name: the package is not there when tests are only collected.
    library = importlib.import_module("transformers")
    if kind == "dense":
        config = library.Qwen3_5TextConfig(**shared, intermediate_size=256)
        family = library.Qwen3_5ForCausalLM
    else:
        experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
        config = library.Qwen3_5MoeTextConfig(**shared, **experts, shared_expert_intermediate_size=64)
        family = library.Qwen3_5MoeForCausalLM
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16().float())
    return model


def _theirs(model: Any, ids: Tensor) -> Tensor:
    """[T, V] in the model's dtype, without a cache."""
    with torch.inference_mode():
        logits: Tensor = model(ids).logits[0]
    return logits


def _ours(folder: Path, dtype: str = "float32") -> Any:
    return vtensors.load_model(folder, device="cpu", dtype=dtype)


def _farthest(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


@each_kind
def test_logits_are_those_of_transformers(make: Make, kind: str, value_heads: int) -> None:
    theirs, folder = make(kind, value_heads)
    ours = _ours(folder)
    for tokens in (1, 2, 3, 4, 63, 64, 65, 130):
        ids = TOKENS[:, :tokens]
        assert _farthest(ours.logits(ids)[0], _theirs(theirs, ids)) <= 1e-5, f"{tokens} tokens"


@each_kind
def test_logits_of_deeper_and_wilder_models_are_those_of_transformers(
    make: Make, kind: str, value_heads: int
) -> None:
    theirs, folder = make(kind, value_heads, 8, 0.04)
    ids = TOKENS[:, :130]
    assert _farthest(_ours(folder).logits(ids)[0], _theirs(theirs, ids)) <= 1e-4


@each_kind
@pytest.mark.parametrize("pieces", [(77, 64, 59), (1, 1, 1, 1, 196), (4, 63, 65, 1, 1, 1, 65)])
def test_a_prompt_in_pieces_gives_the_logits_that_transformers_has_for_the_whole(
    make: Make, kind: str, value_heads: int, pieces: tuple[int, ...]
) -> None:
    theirs, folder = make(kind, value_heads)
    wanted, ours = _theirs(theirs, TOKENS), _ours(folder)
    state, end = ours.new_state(), 0
    for piece in pieces:
        row = ours.step(TOKENS[0, end : end + piece], state)
        end += piece
        assert _farthest(row, wanted[end - 1]) <= 1e-5, f"behind {end} tokens"


@each_kind
def test_greedy_tokens_are_those_of_transformers(make: Make, kind: str, value_heads: int) -> None:
    theirs, folder = make(kind, value_heads, 8, 0.04)
    llm = vtensors.LLM(_ours(folder))
    params = vtensors.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [TOKENS[0, start : start + length].tolist() for start, length in ((0, 1), (5, 3), (20, 70))]
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        whole = _theirs(theirs, torch.tensor([prompt + answer.token_ids]))[len(prompt) - 1 : -1]
        gaps = whole.max(-1).values - whole[range(40), answer.token_ids]
        assert float(gaps.max()) <= 1e-4


@each_kind
def test_16_bits_are_as_near_to_float32_as_those_of_transformers(
    make: Make, kind: str, value_heads: int
) -> None:
    theirs, folder = make(kind, value_heads, 8, 0.04)
    wanted = _theirs(theirs, TOKENS)
    rounded = {
        "ours": _ours(folder, "bfloat16").logits(TOKENS)[0].float(),
        "theirs": _theirs(_random_model(kind, value_heads, 8, 0.04).to(torch.bfloat16), TOKENS).float(),
    }
    error = {name: float((logits - wanted).abs().mean()) for name, logits in rounded.items()}
    others = {name: int((x.argmax(-1) != wanted.argmax(-1)).sum()) for name, x in rounded.items()}
    print(f"{kind} {value_heads}: mean errors {error}, of 200 tokens differ {others}")
    assert error["ours"] <= 1.1 * error["theirs"]
    assert others["ours"] <= 1.25 * others["theirs"] + 3
