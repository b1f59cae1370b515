"""Paged attention whose kernels run on the CPU in the emulator: the class itself with another compiler and launcher."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import attrs
import pytest
import torch

from emulation.emulator import emulate
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.paged_attention import AttentionShape
from vtensors_kernels.steps import paged_attention, paged_prefill
from vtensors_kernels.steps.paged_attention_forms import decode_form, stream_form
from vtensors_kernels.steps.paged_attention_probe import rounding_errors


@attrs.frozen(kw_only=True)
class Compiled:
    """A function to be emulated."""

    source: str
    name: str
    defines: Mapping[str, int]
    target: str = "sm_90a"


@attrs.frozen(kw_only=True)
class EmulatedLaunch:
    """As `Launch`: one argument per parameter, addresses of CPU tensors among them."""

    function: Compiled
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: int
    dependent: bool
    shared_bytes: int = 0

    def call(self, stream: int, *arguments: int) -> None:
        """Run it to its end, its threads in an order that depends on how many rows there are."""
        assert len(arguments) == self.arguments
        own = self.function
        emulate(
            own.source,
            own.name,
            own.defines,
            self.grid,
            self.block,
            arguments,
            shared_bytes=self.shared_bytes,
            arch=900 if own.target == "sm_90a" else 800,
            seed=self.grid[1],
        )


def emulate_attention(monkeypatch: pytest.MonkeyPatch, target: str = "sm_90a") -> None:
    """From here on PagedAttention works on CPU tensors, as on a device of that target with 132 multiprocessors."""

    def compiled(
        source: str, name: str, _device: int, defines: Mapping[str, int], _shared_bytes: int = 0
    ) -> Compiled:
        return Compiled(source=source, name=name, defines=dict(defines), target=target)

    for module in (paged_attention, paged_prefill):
        monkeypatch.setattr(module, "compiled_function", compiled)
        monkeypatch.setattr(module, "Launch", EmulatedLaunch)
    monkeypatch.setattr(paged_attention, "device_of", torch.device)
    monkeypatch.setattr(paged_attention, "hardware_of", lambda _index: (target, 132))
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)


def attention_shape(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    rotary: int | None = None,
    gated: bool = True,
    normed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    kv_scales: tuple[float, float] | None = None,
    device: str = "cpu",
) -> AttentionShape:
    """A shape with gains around 1. rotary: None for a quarter of the dimensions."""
    gains = [torch.rand(dim, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(2)]
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=dim // 4 if rotary is None else rotary,
        gated=gated,
        q_gain=gains[0].to(device) if normed else None,
        k_gain=gains[1].to(device) if normed else None,
        eps=1e-6,
        scale=dim**-0.5,
        dtype=dtype,
        kv_scales=kv_scales,
    )


def attention_of(
    shape: AttentionShape,
    *,
    max_positions: int = 4096,
    device: str = "cpu",
    decode: bool = False,
    stream: bool = False,
    blocks: int | None = None,
) -> paged_attention.PagedAttention:
    """The kernel of that shape. decode, stream: that one even where another is chosen."""
    half, form = dtype_defines(shape.dtype), None
    if decode:
        form = decode_form(half, shape.head_dim, shape.kv_scales is not None)
    elif stream:
        form = stream_form("sm_90a", half, shape.head_dim)
    return paged_attention.PagedAttention(
        **{field.name: getattr(shape, field.name) for field in attrs.fields(AttentionShape)},
        max_positions=max_positions,
        device=torch.device(device),
        form=form,
        blocks=blocks,
    )


def assert_only_rounded(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """found [rows, columns], 16 bits, is wanted, float32, but for its rounding and a little in each row."""
    errors = (found.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    limits = 1.1 * rounding_errors(wanted, found.dtype) + 1e-6
    assert bool((errors < limits).all()), (errors, limits)
