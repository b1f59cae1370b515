"""A gated delta net with random weights, inputs and dirty slots, and what the reference makes of them."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors_kernels.reference.gated_delta_net import GatedDeltaWeights, gated_delta_net
from vtensors_kernels.steps.gated_delta_form import PREFILL_COLUMNS, PREFILL_SPAN
from vtensors_kernels.steps.gated_delta_net import GatedDeltaNetKernel

HALVES = [torch.bfloat16, torch.float16]
EPS = 1e-6
# Of ||ours - reference|| / ||reference||: float32 in another order, and what a value near the middle of two 16-bit
# ones then does: the convolution is rounded once on either side.
LIMITS = {torch.bfloat16: 1e-3, torch.float16: 2e-4}


@attrs.frozen(kw_only=True)
class Inputs:
    """Rows of qkv, z, b and a: columns of one wider matrix, so that their rows lie apart."""

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor

    def rows(self, begin: int, end: int) -> Inputs:
        """Those rows."""
        return Inputs(**{name: x[begin:end] for name, x in attrs.asdict(self, recurse=False).items()})

    def at(self, index: Tensor) -> Inputs:
        """The rows of that index, in its order."""
        return Inputs(**{name: x[index] for name, x in attrs.asdict(self, recurse=False).items()})

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order of the kernel's arguments."""
        return self.qkv, self.z, self.b, self.a


def make_kernel(
    key_heads: int = 2,
    value_heads: int = 6,
    key_dim: int = 32,
    value_dim: int = 32,
    taps: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    prefill_columns: tuple[int, int] = (PREFILL_COLUMNS, PREFILL_SPAN),
) -> GatedDeltaNetKernel:
    """Bound to random weights whose decay spans slow and fast heads."""
    generator = torch.Generator().manual_seed(key_heads + value_heads + key_dim)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return GatedDeltaNetKernel(
        key_heads=key_heads,
        value_heads=value_heads,
        conv=(torch.randn(channels, taps, generator=generator) * 0.5).to(device),
        decay=-torch.linspace(0.01, 4, value_heads).to(device),
        dt_bias=torch.randn(value_heads, generator=generator).to(device),
        norm=(torch.rand(value_dim, generator=generator) + 0.5).to(device),
        eps=EPS,
        dtype=dtype,
        prefill_columns=prefill_columns,
    )


def make_inputs(kernel: GatedDeltaNetKernel, rows: int, seed: int = 0, spread: float = 1.0) -> Inputs:
    """Random rows; a has values beyond 20, where softplus is the identity."""
    form, generator = kernel.form, torch.Generator().manual_seed(seed)
    widths = (form.channels, form.value_width, form.value_heads, form.value_heads)
    wide = torch.randn(rows, sum(widths) + 3, generator=generator) * spread
    wide[:, -3 - form.value_heads] = 100.0
    qkv, z, b, a, _ = wide.to(kernel.dtype).to(kernel.device).split_with_sizes((*widths, 3), dim=1)
    return Inputs(qkv=qkv, z=z, b=b, a=a)


def dirty_slots(kernel: GatedDeltaNetKernel, slots: int) -> tuple[Tensor, Tensor]:
    """History and memory full of NaN, as a slot may be that was used before."""
    form = kernel.form
    history = torch.full((slots, form.taps, form.channels), float("nan"), dtype=kernel.dtype)
    memory = torch.full((slots, form.value_heads, form.key_dim, form.value_dim), float("nan"))
    return history.to(kernel.device), memory.to(kernel.device)


def integers(kernel: GatedDeltaNetKernel, *values: int) -> Tensor:
    """int32 on the kernel's device."""
    return torch.tensor(values, dtype=torch.int32, device=kernel.device)


def decoded(
    kernel: GatedDeltaNetKernel, inputs: Inputs, state: tuple[Tensor, Tensor], slot: int, start: int = 0
) -> Tensor:
    """Output rows of one sequence, one decode call each, from position start on."""
    rows = []
    for t in range(inputs.qkv.shape[0]):
        slots, positions = integers(kernel, slot), integers(kernel, start + t)
        out = torch.full((1, kernel.form.value_width), float("nan"), dtype=kernel.dtype, device=kernel.device)
        rows.append(kernel.decode(*inputs.rows(t, t + 1).all(), *state, slots, positions, out))
    return torch.cat(rows)


def expected(kernel: GatedDeltaNetKernel, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's output rows, history and memory from position 0 on, on the CPU."""
    form, weights = kernel.form, kernel.weights
    on_cpu = GatedDeltaWeights(
        key_heads=form.key_heads,
        conv=weights.conv.cpu(),
        decay=weights.decay.cpu(),
        dt_bias=weights.dt_bias.cpu(),
        norm=weights.norm.cpu(),
        eps=weights.eps,
    )
    history = torch.zeros(form.taps - 1, form.channels, dtype=kernel.dtype)
    memory = torch.zeros(form.value_heads, form.key_dim, form.value_dim)
    return gated_delta_net(on_cpu, *(x.cpu() for x in inputs.all()), history, memory)


def check(ours: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Asserts that the two are the same but for rounding."""
    ours, wanted = ours.cpu().float(), wanted.float()
    assert ours.shape == wanted.shape
    assert bool(torch.isfinite(ours).all())
    error = float((ours - wanted).norm() / wanted.norm())
    assert error < LIMITS[dtype], f"relative error {error:.2e}"


def ring_in_order(history: Tensor, tokens: int) -> Tensor:
    """The last W - 1 raw inputs of a slot's ring [W, C], oldest first, after so many tokens."""
    taps = history.shape[0]
    return torch.stack([history[p % taps] for p in range(tokens - taps + 1, tokens)])
