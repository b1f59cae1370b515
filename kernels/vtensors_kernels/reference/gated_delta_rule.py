"""The gated delta rule: token by token (the specification) and in chunks (the same numbers, faster)."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
_NORM_EPS = 1e-6

# From this many tokens on the chunked form is used.
_FEWEST_FOR_CHUNKS = 8


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """o [T, HV, DV] float32 and the new state; whichever of the two forms is faster for T.

    q, k: [T, HK, DK]; v: [T, HV, DV], any float dtype. g: [T, HV] float32, log decay <= 0.
    beta: [T, HV] float32. state: [HV, DK, DV] float32, not changed.
    """
    form = chunked if q.shape[0] >= _FEWEST_FOR_CHUNKS else recurrent
    return form(q, k, v, g, beta, state)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: S = e^g S; d = beta (v - S^T k); S = S + k d^T; o = S^T q. As `gated_delta_rule`."""
    q, k, v = _prepare(q, k, v)
    decay = g.exp()
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = state * decay[t, :, None, None]
        read = (k[t].unsqueeze(1) @ state).squeeze(1)
        delta = beta[t].unsqueeze(-1) * (v[t] - read)
        state = torch.baddbmm(state, k[t].unsqueeze(2), delta.unsqueeze(1))
        out[t] = (q[t].unsqueeze(1) @ state).squeeze(1)
    return out, state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same as `recurrent`, chunk tokens at a time. Arguments as in `gated_delta_rule`.

    With G the running sum of g in a chunk, L[i, j] = e^(G_i - G_j) for j <= i and B = diag(beta):
    A = strictly lower (B K K^T * L); U = (I + A)^-1 B V; Y = (I + A)^-1 B diag(e^G) K; N = U - Y S;
    O = diag(e^G) Q S + (lower(Q K^T) * L) N;  S = e^(G_C) S + (diag(e^(G_C - G)) K)^T N.
    """
    # [HV, T, ...] from here on.
    q, k, v = (x.transpose(0, 1) for x in _prepare(q, k, v))
    g, beta = g.t(), beta.t().unsqueeze(-1)
    parts = []
    for start in range(0, q.shape[1], chunk):
        block = slice(start, start + chunk)
        qc, kc, bc = q[:, block], k[:, block], beta[:, block]
        total = g[:, block].cumsum(-1)
        # Only differences <= 0 are exponentiated: those above the diagonal are masked first.
        differences = total.unsqueeze(2) - total.unsqueeze(1)
        above = torch.ones(differences.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        ratio = differences.masked_fill(above, float("-inf")).exp()
        lower = ((kc * bc) @ kc.transpose(1, 2) * ratio).tril(-1)
        grown = total.exp().unsqueeze(-1)
        right = torch.cat((bc * v[:, block], bc * grown * kc), dim=-1)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        update, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        new = update - keys @ state
        parts.append(grown * (qc @ state) + (qc @ kc.transpose(1, 2) * ratio) @ new)
        last = total[:, -1:]
        faded = kc * (last - total).exp().unsqueeze(-1)
        state = torch.baddbmm(last.exp().unsqueeze(-1) * state, faded.transpose(1, 2), new)
    return torch.cat(parts, dim=1).transpose(0, 1), state


def _prepare(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of length 1 (sum of squares, not mean), q times DK^-0.5 too, and v; float32.

    q and k once per value head: value head j takes key head j // (HV / HK).
    """
    copies = v.shape[1] // q.shape[1]
    q, k = (_unit(x.to(torch.float32)) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    if copies > 1:
        q, k = q.repeat_interleave(copies, dim=1), k.repeat_interleave(copies, dim=1)
    return q, k, v.to(torch.float32)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
