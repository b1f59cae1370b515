"""Rotary embedding and attention against loops over positions and heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vtensors_kernels.reference import attention as attention_file
from vtensors_kernels.reference.attention import attention
from vtensors_kernels.reference.rope import rope, rope_angles


def _by_loops(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    tokens, heads, dim = q.shape
    groups, length, _ = keys.shape
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    for t in range(tokens):
        for j in range(heads):
            kv, end = j // (heads // groups), length - tokens + t + 1
            scores = (keys[kv, :end].double() @ q[t, j].double()) * scale
            out[t, j] = scores.softmax(0) @ values[kv, :end].double()
    return out


@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (1, 9), (5, 5), (4, 11)])
@pytest.mark.parametrize("heads", [2, 6])
def test_each_query_sees_its_history_through_the_key_head_of_its_group(
    tokens: int, length: int, heads: int
) -> None:
    q, keys, values = torch.randn(tokens, heads, 8), torch.randn(2, length, 8), torch.randn(2, length, 8)
    ours = attention(q, keys, values, 0.3)
    torch.testing.assert_close(ours.double(), _by_loops(q, keys, values, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries_at_a_time", [1, 2, 3])
def test_blocks_of_queries_give_the_same(monkeypatch: pytest.MonkeyPatch, queries_at_a_time: int) -> None:
    q, keys, values = torch.randn(7, 4, 8), torch.randn(2, 10, 8), torch.randn(2, 10, 8)
    whole = attention(q, keys, values, 0.3)
    monkeypatch.setattr(attention_file, "SCORE_BYTES", queries_at_a_time * 4 * 4 * 10)
    torch.testing.assert_close(attention(q, keys, values, 0.3), whole, rtol=0, atol=1e-6)


def test_rope_turns_pairs_of_halves_and_leaves_the_rest() -> None:
    x, frequencies = torch.randn(3, 2, 10), torch.tensor([1.0, 0.25, 0.01])
    positions = torch.tensor([0, 1, 7])
    turned = rope(x, *rope_angles(positions, frequencies))
    assert torch.equal(turned[..., 6:], x[..., 6:])
    torch.testing.assert_close(turned[0], x[0])
    for t, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(frequencies.tolist()):
            a, b = x[t, :, i], x[t, :, i + 3]
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            torch.testing.assert_close(turned[t, :, i], a * cos - b * sin, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(turned[t, :, i + 3], b * cos + a * sin, rtol=1e-5, atol=1e-6)


def test_rope_keeps_the_dtype() -> None:
    cos, sin = rope_angles(torch.tensor([3]), torch.tensor([0.5, 0.1]))
    assert rope(torch.randn(1, 1, 4, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
