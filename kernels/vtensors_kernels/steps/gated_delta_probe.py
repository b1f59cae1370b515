"""The self-test of a bound gated delta net kernel: a short prompt, and a step of two rows right behind the kernels that
say which sequences they are, against the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_kernels.reference.gated_delta_net import GatedDeltaWeights, gated_delta_net
from vtensors_kernels.steps.gated_delta_net import GatedDeltaNetKernel
from vtensors_kernels.steps.next_token import NextToken

_TOKENS = 7
# Logits of a row while whose largest is looked for the next kernel has begun.
_LOGITS = 1 << 17
# Of ||ours - reference|| / ||reference||: both round the convolution to 16 bits, not always the same way.
_TOLERANCES = {torch.bfloat16: 2e-3, torch.float16: 4e-4}


def probe_gated_delta_net(kernel: GatedDeltaNetKernel) -> None:
    """Runs the kernel with its own weights on random inputs, from slots full of NaN.

    Raises VtensorsError where a result, the history or the memory is not the reference's, and where a row of `decode`
    is not bit for bit what `prefill` gives.
    """
    form, device, dtype = kernel.form, kernel.device, kernel.dtype
    generator = torch.Generator().manual_seed(0)
    widths = (form.channels, form.value_width, form.value_heads, form.value_heads)
    wide = torch.randn(_TOKENS, sum(widths), generator=generator).to(dtype)
    qkv, z, b, a = wide.split_with_sizes(widths, dim=1)
    on_cpu = GatedDeltaWeights(
        key_heads=form.key_heads,
        conv=kernel.weights.conv.cpu(),
        decay=kernel.weights.decay.cpu(),
        dt_bias=kernel.weights.dt_bias.cpu(),
        norm=kernel.weights.norm.cpu(),
        eps=kernel.weights.eps,
    )
    nothing = torch.zeros(form.taps - 1, form.channels, dtype=dtype)
    empty = torch.zeros(form.value_heads, form.key_dim, form.value_dim)
    wanted, _, wanted_memory = gated_delta_net(on_cpu, qkv, z, b, a, nothing, empty)

    history = torch.full((3, form.taps, form.channels), float("nan"), dtype=dtype, device=device)
    memory = torch.full((3, *empty.shape), float("nan"), device=device)
    qkv, z, b, a = (x.to(device) for x in (qkv, z, b, a))

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def prefill(slot: int, tokens: int) -> Tensor:
        rows = slice(0, tokens)
        place = integers(slot), integers(0)
        return kernel.prefill(qkv[rows], z[rows], b[rows], a[rows], history, memory, *place)

    whole = prefill(0, _TOKENS)
    _require(whole, wanted, _TOLERANCES[dtype], "the outputs of a prompt")
    _require(memory[0], wanted_memory, _TOLERANCES[dtype], "the memory after a prompt")
    # Two sequences that are one token behind.
    prefill(1, _TOKENS - 1)
    prefill(2, 1)
    rows, place = [_TOKENS - 1, 1], (integers(2, 99), integers(1, _TOKENS))
    _move(place, (integers(1, 2), integers(_TOKENS - 1, 1)), dtype)
    step = kernel.decode(qkv[rows], z[rows], b[rows], a[rows], history, memory, *place)
    for ours, other, what in (
        (step, torch.stack((whole[_TOKENS - 1], whole[1])), "outputs"),
        (memory[1], memory[0], "memory"),
        (history[1], history[0], "history"),
    ):
        # What a ring never held (more taps than tokens) stays NaN in both.
        if not torch.equal(ours.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)):
            raise VtensorsError(
                f"a gated delta net gives other {what} for a step than for a prompt",
                seen=f"{form.key_heads} and {form.value_heads} heads of {form.key_dim} and {form.value_dim}, {dtype}",
            )


def _move(place: tuple[Tensor, ...], to: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Makes `place` be `to`; on a CUDA device by kernels behind which the next one starts before they are done."""
    steps = [there - here for here, there in zip(place, to, strict=True)]
    rows, device = len(place[0]), place[0].device
    if device.type != "cuda":
        for numbers, by in zip(place, steps, strict=True):
            numbers += by
        return
    move, logits = NextToken(device, dtype), torch.zeros(rows, _LOGITS, dtype=dtype, device=device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    for numbers, by in zip(place, steps, strict=True):
        move(logits, tokens, numbers, by, logits.new_zeros(rows, dtype=torch.float32))


def _require(ours: Tensor, wanted: Tensor, accepted: float, what: str) -> None:
    ours, wanted = ours.cpu().float(), wanted.float()
    error = float((ours - wanted).norm() / wanted.norm().clamp_min(1e-20))
    if not error < accepted:
        raise VtensorsError(
            f"a gated delta net has {what} wrong",
            seen=f"relative error {error:.2e}",
            accepted=f"below {accepted:g}",
        )
