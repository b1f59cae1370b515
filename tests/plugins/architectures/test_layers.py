"""Whole layers against their formulas, written out in float64 from the dequantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_decoders import tiny_config, tiny_model, tiny_weights
from vtensors_kernels.reference.rope import rope_angles

T = 7
X = torch.randn(T, 32, generator=torch.Generator().manual_seed(3))


def _layer(family: str, index: int, part: str) -> tuple[Any, dict[str, Tensor]]:
    """A layer of the tiny model and that part's weights in float64 by their last names."""
    config = tiny_config(family)
    weights = tiny_weights(config)
    place = f"layers.{index}.{part}."
    own = {
        name.removeprefix(place): weight.dequantize(torch.float32).double()
        for name, weight in weights.items()
        if name.startswith(place)
    }
    return tiny_model(config, weights).layers[index], own


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def _turn(x: Tensor, half: int) -> Tensor:
    """x [T, H, D] with pairs (i, i + half) turned by t * 10000^(-i / half), as complex numbers."""
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angles, dtype=torch.float64), angles.double()
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize(("family", "half"), [("qwen3_5", 4), ("qwen3", 8), ("llama", 8)])
def test_attention_layers(family: str, half: int) -> None:
    layer, w = _layer(family, 1, "self_attn")
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    state = layer.mixer.new_state(torch.float32, torch.device("cpu"))
    ours = layer.mixer(X, layer.input_norm, state, *rope_angles(torch.arange(T), frequencies))

    x = _norm(X.double(), layer.input_norm.gain.double())
    q, gate = (x @ w["q_proj"].t()).view(T, 4, -1), None
    if family == "qwen3_5":
        q, gate = q[..., :16], q[..., 16:]
    k, v = (x @ w["k_proj"].t()).view(T, 2, 16), (x @ w["v_proj"].t()).view(T, 2, 16)
    if family != "llama":
        one = 1.0 if family == "qwen3_5" else 0.0
        q, k = _norm(q, w["q_norm"] + one), _norm(k, w["k_norm"] + one)
    q, k = _turn(q, half), _turn(k, half)
    mixed = torch.zeros(T, 4, 16, dtype=torch.float64)
    for t in range(T):
        for head in range(4):
            scores = k[: t + 1, head // 2] @ q[t, head] / 4
            mixed[t, head] = scores.softmax(0) @ v[: t + 1, head // 2]
    if gate is not None:
        mixed = mixed / (1 + (-gate).exp())
    expected = X.double() + mixed.reshape(T, 64) @ w["o_proj"].t()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_gated_delta_net_layer() -> None:
    layer, w = _layer("qwen3_5", 0, "linear_attn")
    state = layer.mixer.new_state(torch.float32, torch.device("cpu"))
    nothing = torch.empty(0)
    ours = layer.mixer(X, layer.input_norm, state, nothing, nothing)

    x = _norm(X.double(), layer.input_norm.gain.double())
    raw = F.pad(x @ w["in_proj_qkv"].t(), (0, 0, 3, 0))
    taps = w["conv1d"][:, 0]
    mixed = F.silu(sum(raw[j : j + T] * taps[:, j] for j in range(4)))  # type: ignore[arg-type]
    q, k, v = mixed[:, :16].view(T, 2, 8), mixed[:, 16:32].view(T, 2, 8), mixed[:, 32:].view(T, 4, 12)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = (x @ w["in_proj_z"].t()).view(T, 4, 12)
    beta = 1 / (1 + (-(x @ w["in_proj_b"].t())).exp())
    g = -w["A_log"].exp() * (1 + (x @ w["in_proj_a"].t() + w["dt_bias"]).exp()).log()
    out = torch.zeros(T, 4, 12, dtype=torch.float64)
    for head in range(4):
        memory = torch.zeros(8, 12, dtype=torch.float64)
        for t in range(T):
            query, key = q[t, head // 2] * 8**-0.5, k[t, head // 2]
            memory = g[t, head].exp() * memory
            memory = memory + torch.outer(key, beta[t, head] * (v[t, head] - key @ memory))
            out[t, head] = query @ memory
    expected = X.double() + (_norm(out, w["norm"]) * F.silu(z)).reshape(T, 48) @ w["out_proj"].t()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_mixture_of_experts_layer() -> None:
    layer, w = _layer("qwen3_5_moe", 0, "mlp")
    ours = layer.mlp(X, layer.post_norm)

    def swiglu(x: Tensor, name: str) -> Tensor:
        hidden = F.silu(x @ w[f"{name}.gate_proj"].t()) * (x @ w[f"{name}.up_proj"].t())
        return hidden @ w[f"{name}.down_proj"].t()

    x = _norm(X.double(), layer.post_norm.gain.double())
    chances = (x @ w["gate"].t()).softmax(-1)
    expected = X + swiglu(x, "shared_expert") / (1 + (-(x @ w["shared_expert_gate"].t())).exp())
    for t in range(T):
        chosen = chances[t].topk(2).indices.tolist()
        total = sum(float(chances[t, expert]) for expert in chosen)
        for expert in chosen:
            expected[t] += float(chances[t, expert]) / total * swiglu(x[t], f"experts.{expert}")
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_dense_layer_and_its_residuals(family: str) -> None:
    layer, w = _layer(family, 1, "mlp")
    x = _norm(X.double(), layer.post_norm.gain.double())
    expected = X + (F.silu(x @ w["gate_proj"].t()) * (x @ w["up_proj"].t())) @ w["down_proj"].t()
    torch.testing.assert_close(layer.mlp(X, layer.post_norm).double(), expected, rtol=1e-4, atol=1e-5)

    def fresh() -> Any:
        return layer.mixer.new_state(torch.float32, torch.device("cpu"))

    angles = rope_angles(torch.arange(T), torch.ones(8))
    h = layer.mixer(X, layer.input_norm, fresh(), *angles)
    assert torch.equal(layer(X, fresh(), *angles), layer.mlp(h, layer.post_norm))
