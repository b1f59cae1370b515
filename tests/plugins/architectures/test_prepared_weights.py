"""Weights in a kernel's own layout: what was stored is let go, one group at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import vtensors
from fake_plugins import candidate, module
from tiny_decoders import tiny_config, tiny_model, tiny_weights
from vtensors.manager import Plugins
from vtensors.records import KernelRequest, KernelSpec, Progress
from vtensors_formats import NVFP4Weight, Weight
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_plugins.architectures import qwen3
from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.models.decoder import Decoder
from vtensors_plugins.backends import reference

IDS = torch.arange(9)[None] * 4 % 40
CHECKPOINT = Path(__file__).parents[2] / "data" / "llama-llmcompressor-nvfp4a16"
Prepare = Callable[[Sequence[Any], KernelRequest], Any]


def _refuses_shared(request: KernelRequest) -> str | None:
    return "the weight would be kept twice" if "shared" in request.traits else None


@attrs.frozen(eq=False)
class Packed:
    """A prepared form: nothing but numbers."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def _packing(prepare: Prepare) -> list[KernelSpec]:
    """Kernels of the layout `packed`: float32 values, the parts stacked."""

    def multiply(packed: Packed, x: Tensor) -> Tensor:
        return x @ packed.values.t()

    calls: dict[str, Callable[..., Tensor]] = {
        "linear": multiply,
        "linear_add": lambda packed, x, residual: residual + multiply(packed, x),
        "norm_linears": lambda packed, x, gain, eps: multiply(
            packed, rms_norm(x, gain, eps, zero_centered=False)
        ),
    }

    def kernel(op: str, compute: Callable[..., Tensor]) -> KernelSpec:
        return KernelSpec(
            name=f"{op}_packed",
            op=op,
            schemes=("nvfp4",),
            targets=("cpu",),
            numerics="1e-5 of the largest value",
            refuse=_refuses_shared,
            bind=lambda packed, request: lambda *arguments: compute(packed, *arguments),
            cost=10.0,
            layout="packed",
            prepare=prepare,
        )

    return [kernel(op, compute) for op, compute in calls.items()]


@attrs.define(eq=False)
class Fresh(dict[str, Weight]):
    """Weights whose codes nobody else holds: a copy at each look-up, as from a file."""

    given: list[weakref.ref[Tensor]] = attrs.field(factory=list)

    def __getitem__(self, name: str) -> Weight:
        weight = super().__getitem__(name)
        if not isinstance(weight, NVFP4Weight):
            return weight
        copy = attrs.evolve(weight, codes=weight.codes.clone())
        self.given.append(weakref.ref(copy.codes))
        return copy

    def alive(self) -> list[int]:
        """Rows of the codes that are still held."""
        gc.collect()
        return [codes.shape[0] for ref in self.given if (codes := ref()) is not None]


def test_a_prepared_weight_replaces_the_stored_one_and_no_two_groups_are_held_twice() -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    plain = tiny_weights(config, head=None)
    for name, weight in plain.items():
        if len(weight.shape) == 2:
            plain[name] = quantize_nvfp4(weight.dequantize(torch.float32))
    fresh = Fresh()
    fresh.update(plain)
    held: list[tuple[list[int], tuple[int, ...]]] = []

    def prepare(weights: Sequence[Any], request: KernelRequest) -> Packed:
        held.append((fresh.alive(), request.parts))
        return Packed(torch.cat([weight.dequantize(torch.float32) for weight in weights]))

    own = BuildOptions(
        dtype=torch.float32, device="cpu", kernels=[*reference.vtensors_kernels(), *_packing(prepare)]
    )
    model: Decoder = qwen3.build(config, fresh, own)
    # While one group is prepared: its own weights, and the embeddings, which the tied head needs as stored.
    parts = [(64, 32, 32), (32,), (48,), (48,), (32,)]
    assert [own for _, own in held] == 2 * parts
    for alive, own in held:
        pair = (48, 48)
        assert sorted(alive) in (sorted((40, *own)), sorted((40, *pair)) if own == (48,) else [])
    assert fresh.alive() == [40]
    layouts = {record.module: record.layout for record in model.selected}
    assert layouts.pop("embed_tokens") == "stored"
    assert set(layouts.values()) == {"packed"}
    q = next(record for record in model.selected if record.module == "layers.0.self_attn.q_proj")
    assert q.prepared_bytes == 128 * 32 * 4
    expected = tiny_model(config, plain).logits(IDS)
    torch.testing.assert_close(model.logits(IDS), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_loaded_model_holds_no_stored_weight_beside_a_prepared_one() -> None:
    codes: list[weakref.ref[Tensor]] = []
    held: list[tuple[int, int]] = []

    def prepare(weights: Sequence[Any], request: KernelRequest) -> Packed:
        gc.collect()
        held.append((sum(ref() is not None for ref in codes), len(weights)))
        codes.extend(weakref.ref(weight.codes) for weight in weights)
        return Packed(torch.cat([weight.dequantize(torch.float32) for weight in weights]))

    events: list[Progress] = []
    hooks: dict[str, Callable[..., Any]] = {
        "vtensors_kernels": lambda: _packing(prepare),
        "vtensors_progress": lambda event: events.append(event),
    }
    plugins = Plugins.discover(third_parties=[candidate("packing", module("packing", hooks))], environ={})
    model = vtensors.load_model(CHECKPOINT, device="cpu", plugins=plugins)
    gc.collect()
    assert len(codes) > 10
    assert not any(ref() is not None for ref in codes)
    # Nothing of an earlier group is left but the gate while the up beside it is prepared.
    assert {alive for alive, _ in held} <= {0, 1}
    assert any(parts == 3 for _, parts in held)
    expected = vtensors.load_model(CHECKPOINT, device="cpu").logits(IDS)
    torch.testing.assert_close(model.logits(IDS), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    told = [(event.done, event.total) for event in events if event.task == "load"]
    assert told[0][0] == 0
    assert told[-1] == (told[0][1], told[0][1])
