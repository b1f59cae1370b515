"""Launchers on the CPU: their launches go to the emulator, and products of FP8 to a twin of `torch._scaled_mm`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate
from vtensors_kernels.activation_quantizers import fp8 as quantizers
from vtensors_kernels.nvfp4 import finish, stream_launches

# Its forms have no clusters, which the emulator does not know.
_CAPABILITY, _MULTIPROCESSORS = (12, 0), 2


@attrs.frozen(kw_only=True)
class EmulatedFunction:
    """A kernel that is compiled when it is launched."""

    source: str
    name: str
    defines: tuple[tuple[str, int], ...]
    target: str = "sm_120a"


@attrs.define(kw_only=True)
class EmulatedLaunch:
    """Takes what `Launch` takes; arguments that are addresses are those of CPU tensors."""

    function: EmulatedFunction
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: int
    constants: Mapping[int, int] = attrs.field(factory=dict)
    shared_bytes: int = 0
    dependent: bool = False

    def call(self, _stream: int, *given: int) -> None:
        """Run the kernel to its end."""
        assert len(given) + len(self.constants) == self.arguments
        rest = iter(given)
        arguments = [self.constants[i] if i in self.constants else next(rest) for i in range(self.arguments)]
        emulate(
            self.function.source,
            self.function.name,
            dict(self.function.defines),
            self.grid,
            self.block,
            arguments,
            shared_bytes=self.shared_bytes,
        )


def on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizers, streaming linears and W8A8 linears of CPU tensors, launched on the emulator from here on."""
    monkeypatch.setattr(quantizers, "DEVICES", ("cuda", "cpu"))
    for module in (quantizers, finish):
        monkeypatch.setattr(module, "compiled_function", _function)
        monkeypatch.setattr(module, "Launch", EmulatedLaunch)
    monkeypatch.setattr(stream_launches, "Launch", EmulatedLaunch)
    monkeypatch.setattr(stream_launches, "_compiled", _compiled)
    monkeypatch.setattr(stream_launches, "_require", lambda packed, variant: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: _CAPABILITY)
    properties = SimpleNamespace(multi_processor_count=_MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """a [M, K] @ b [K, N] as `torch._scaled_mm` takes them on sm_90, with its rules about layouts and sizes."""
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert k % 16 == n % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if scale_a.numel() == scale_b.numel() == 1:
        return ((a.float() @ b.float()) * (scale_a * scale_b)).to(out_dtype)
    groups = -(-k // 128)
    assert not use_fast_accum
    assert scale_a.shape == (m, groups)
    assert scale_a.stride() == (1, m)
    assert scale_b.shape == (groups, -(-n // 128))
    assert scale_b.stride() == (1, groups)
    assert m % 4 == groups % 4 == 0
    wide_a = a.float() * scale_a.repeat_interleave(128, 1)[:, :k]
    wide_b = b.float() * scale_b.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    return (wide_a @ wide_b).to(out_dtype)


def _function(
    source: str, name: str, _device: int, defines: Mapping[str, int], _shared: int = 0
) -> EmulatedFunction:
    return EmulatedFunction(source=source, name=name, defines=tuple(sorted(defines.items())))


def _compiled(
    forms: tuple[Any, ...], packed_format: Any, f16: int, variant: tuple[int, int], _target: str, _index: int
) -> dict[tuple[int, ...], EmulatedFunction]:
    source, name = packed_format.stream
    return {
        tuple(form.defines.values()): _function(
            source,
            name,
            0,
            {**stream_launches.stream_defines(form, f16, *variant), **dict(packed_format.defines)},
        )
        for form in forms
    }
