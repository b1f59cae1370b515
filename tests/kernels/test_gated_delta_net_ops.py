"""The convolution and the delta rule: formula, carried state, chunked against token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vtensors_kernels.reference.causal_conv1d import causal_conv1d
from vtensors_kernels.reference.gated_delta_rule import chunked, gated_delta_rule, recurrent

HK, HV, DK, DV = 2, 6, 8, 5
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _inputs(tokens: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    g = -F.softplus(random(tokens, HV))
    return (
        random(tokens, HK, DK),
        random(tokens, HK, DK),
        random(tokens, HV, DV),
        g,
        random(tokens, HV).sigmoid(),
    )


def _state(seed: int = 5) -> Tensor:
    return torch.randn(HV, DK, DV, generator=torch.Generator().manual_seed(seed))


def _piece(inputs: Inputs, start: int, stop: int) -> Inputs:
    q, k, v, g, beta = (x[start:stop] for x in inputs)
    return q, k, v, g, beta


@pytest.mark.parametrize("form", [recurrent, chunked], ids=["recurrent", "chunked"])
def test_the_delta_rule_follows_its_formula(form: object) -> None:
    q, k, v, g, beta = _inputs(9)
    state = _state()
    out, last = form(q, k, v, g, beta, state)  # type: ignore[operator]
    for j in range(HV):
        memory = state[j].double()
        for t in range(9):
            query, key = q[t, j // (HV // HK)].double(), k[t, j // (HV // HK)].double()
            query = query / (query.square().sum() + 1e-6).sqrt() * DK**-0.5
            key = key / (key.square().sum() + 1e-6).sqrt()
            memory = memory * g[t, j].double().exp()
            delta = beta[t, j].double() * (v[t, j].double() - memory.t() @ key)
            memory = memory + torch.outer(key, delta)
            torch.testing.assert_close(out[t, j].double(), memory.t() @ query, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[j].double(), memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 63, 64, 65, 130])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunked_and_recurrent_agree(tokens: int, chunk: int) -> None:
    inputs, state = _inputs(tokens), _state()
    out, last = chunked(*inputs, state, chunk)
    expected, expected_last = recurrent(*inputs, state)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, expected_last, rtol=1e-4, atol=1e-5)


def test_strong_decay_stays_finite_in_chunks() -> None:
    q, k, v, g, beta = _inputs(64)
    out, last = chunked(q, k, v, g * 100, beta, _state())
    expected, expected_last = recurrent(q, k, v, g * 100, beta, _state())
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, expected_last, rtol=1e-4, atol=1e-5)


def test_pieces_with_carried_state_equal_the_whole_and_the_given_state_is_kept() -> None:
    inputs, state = _inputs(200), _state()
    before = state.clone()
    whole, last = gated_delta_rule(*inputs, state)
    assert torch.equal(state, before)
    parts = []
    for start, stop in ((0, 77), (77, 141), (141, 199), (199, 200)):
        part, state = gated_delta_rule(*_piece(inputs, start, stop), state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_the_convolution_reads_its_history_and_leaves_the_last_raw_inputs(tokens: int) -> None:
    x, weight, history = torch.randn(tokens, 5), torch.randn(5, 4), torch.randn(3, 5)
    out, new = causal_conv1d(x, weight, history)
    stream = torch.cat((history, x))
    for t in range(tokens):
        expected = F.silu((stream[t : t + 4] * weight.t()).sum(0))
        torch.testing.assert_close(out[t], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(new, stream[-3:])


def test_the_convolution_in_pieces_equals_the_whole() -> None:
    x, weight, history = torch.randn(10, 5), torch.randn(5, 4), torch.zeros(3, 5)
    whole, _ = causal_conv1d(x, weight, history)
    parts = []
    for piece in x.split([1, 2, 1, 6]):
        part, history = causal_conv1d(piece, weight, history)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
