"""The kernels of plain weights launched on small random ones, as bound for a request, against the reference.

Outputs start as NaN. Rows must be the same bits at every number of tokens; sums are float32 and rounded once, as those
of the NVFP4 kernels are, whose tolerances these are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import PlainWeight
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.functions import fingerprint
from vtensors_kernels.plain.cublas import plain_product
from vtensors_kernels.plain.matrix import PlainMatrix, stack_rows
from vtensors_kernels.plain.small import SOURCE, SmallLinear
from vtensors_kernels.plain.small_form import MAX_TOKENS, choose_small_form
from vtensors_kernels.probing import TOLERANCES
from vtensors_kernels.reference.rms_norm import rms_norm

ROWS = 43  # tails of 8 and of 32 rows
EPS = 1e-6
# Either side of where another form or another turn of tokens begins.
_TOKENS = (1, 2, 8, 9, 16, 17, 32, 33, MAX_TOKENS)


def random_matrix(
    rows: int, k: int, dtype: torch.dtype, device: str | torch.device, *, bias: bool = False, seed: int = 0
) -> PlainMatrix:
    """[rows, K] with products of about 1 with unit activations, a bias in rising order where asked."""
    source = torch.Generator().manual_seed(seed * 1_000_003 + k)
    weight = PlainWeight(
        tensor=(torch.randn(rows, k, generator=source) / k**0.5).to(dtype).to(device),
        bias=torch.linspace(-1, 1, rows).to(device) if bias else None,
    )
    return stack_rows([weight])


def random_rows(tokens: int, k: int, dtype: torch.dtype, device: str | torch.device, seed: int = 1) -> Tensor:
    """[tokens, K] whose rows differ in size by up to a factor of 16."""
    source = torch.Generator().manual_seed(seed * 1_000_003 + k)
    sizes = 2.0 ** (torch.arange(tokens) % 5 - 2).unsqueeze(-1)
    return (torch.randn(tokens, k, generator=source) * sizes).to(dtype).to(device)


def wanted(
    matrix: PlainMatrix, x: Tensor, residual: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """float64 [M, N] of the reference, not rounded at the end; behind a norm x is rounded as the reference does."""
    normed = x if gain is None else rms_norm(x, gain, EPS, zero_centered=False)
    y = normed.double() @ matrix.rows.double().T
    for added in (matrix.bias, residual):
        y = y if added is None else y + added.double()
    return y


def probe_plain_small(request: KernelRequest) -> None:
    """Every form that the request's shape may need, for the request's op and with its bias. Raises VtensorsError."""
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    (n, k), dtype = request.shape, getattr(torch, request.dtype)
    matrix = random_matrix(ROWS, k, dtype, request.device, bias="bias" in request.traits)
    norm = request.op.startswith("norm_")
    call = SmallLinear(matrix, dtype, norm=norm, rows=n)
    x = random_rows(MAX_TOKENS, k, dtype, request.device)
    gain = torch.linspace(0.5, 1.5, k).to(request.device) if norm else None
    residual = random_rows(MAX_TOKENS, ROWS, dtype, request.device, seed=2)
    added = residual if request.op == "linear_add" else None

    def run(first: int, tokens: int) -> Tensor:
        out = torch.full((tokens, ROWS), float("nan"), dtype=dtype, device=x.device)
        part = None if added is None else added[first : first + tokens]
        return call(x[first : first + tokens], part, gain, EPS if norm else 0.0, out)

    alone = torch.cat([run(token, 1) for token in range(MAX_TOKENS)])
    for tokens in _TOKENS:
        first = MAX_TOKENS - tokens
        if not torch.equal(run(first, tokens), alone[first:]):
            raise VtensorsError(f"the self-test failed: {tokens} tokens differ from one", seen=request.op)
    _close(alone, wanted(matrix, x, added, gain), TOLERANCES[dtype] * (2 if norm else 1))


def probe_plain_cublas(request: KernelRequest) -> None:
    """torch's product of the request's K and dtype, with its bias or residual. Raises VtensorsError."""
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    k, dtype = request.shape[1], getattr(torch, request.dtype)
    matrix = random_matrix(ROWS, k, dtype, request.device, bias="bias" in request.traits)
    x = random_rows(MAX_TOKENS, k, dtype, request.device)
    residual = random_rows(MAX_TOKENS, ROWS, dtype, request.device, seed=2)
    added = residual if request.op == "linear_add" else None
    call = plain_product(matrix)
    y = call(x) if added is None else call(x, added)
    _close(y, wanted(matrix, x, added), TOLERANCES[dtype] * 2)


def fingerprint_plain_small(request: KernelRequest) -> str:
    """What a verdict depends on: the source and the macros of every form of the request's shape."""
    n, k = request.shape or (0, 0)
    capability = request.capability or (8, 0)
    target, norm = target_of(capability), int(request.op.startswith("norm_"))
    forms = dict.fromkeys(choose_small_form(n, k, m, target) for m in range(1, MAX_TOKENS + 1))
    variant = {"VT_F16": int(request.dtype == "float16"), "VT_NORM": norm}
    found = [fingerprint(SOURCE, {**form.defines, **variant}, capability) for form in forms]
    return " ".join((request.op, *found))


def _close(y: Tensor, reference: Tensor, accepted: float) -> None:
    """Row by row, since they differ in size. Written so that NaN fails."""
    error = float(((y.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max())
    if not error < accepted:
        raise VtensorsError(
            "the self-test failed: the product is wrong",
            seen=f"relative error {error:.1e}",
            accepted=f"{accepted}",
        )
