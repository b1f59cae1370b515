"""The self-tests of the CUDA kernels, given kernels with the faults of others: each is found, an honest one is not.

No GPU: what a launcher would return is computed by torch, with a fault or without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from fake_kernels import Row, Stream, honest, kernel_request, overflowing, stored_linear, swapped_nibbles
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4 import embedding, packed_widening, probes, repack, stored, stream_probe
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.reference.nvfp4_packing import pack_reference


def _missed_reciprocal(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T) / scale


def _scale_of_the_largest(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T) * scale.max()


def _miscompiled(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """Bytes of a word in the other order: codes of 8 columns."""
    words = matrix.reshape(matrix.shape[0], -1, 4, 2).flip(-2)
    return honest(x, words.reshape(matrix.shape), scale)


def _of_another_row(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return honest(x, matrix, scale).roll(1, dims=-1)


def _unwritten_tail(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    y = honest(x, matrix, scale)
    y[:, -1] = float("nan")
    return y


FAULTS = [
    pytest.param(_missed_reciprocal, id="reciprocal", marks=pytest.mark.fault("B01")),
    pytest.param(swapped_nibbles, id="nibbles", marks=pytest.mark.fault("B17")),
    pytest.param(_miscompiled, id="bytes of a word", marks=pytest.mark.fault("B83")),
    pytest.param(_of_another_row, id="another row", marks=pytest.mark.fault("B102")),
    pytest.param(_unwritten_tail, id="unwritten", marks=pytest.mark.fault("B102")),
]


@pytest.fixture
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms as an H200 gets them, few launches, the packing of the twin."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(stream_probe, "REPLAYS", 2)
    monkeypatch.setattr(stream_probe, "pack", pack_reference)


def _probe_stream(monkeypatch: pytest.MonkeyPatch, request: KernelRequest, **fault: Any) -> None:
    monkeypatch.setattr(stream_probe, "StreamLinear", partial(Stream, **fault))
    stream_probe.probe_stream(attrs.evolve(request, capability=(9, 0)))


def _probe_stored(monkeypatch: pytest.MonkeyPatch, request: KernelRequest, row: Row) -> None:
    monkeypatch.setattr(stored, "bind_linear", stored_linear(row))
    probes.probe_linear_stored(request)


@pytest.mark.fault("B102")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("traits", [(), ("bias", "row_scale"), ("pre_scale",)], ids=str)
@pytest.mark.parametrize("k", [64, 176])
def test_an_honest_kernel_without_repack_passes(
    monkeypatch: pytest.MonkeyPatch, k: int, traits: tuple[str, ...], dtype: str
) -> None:
    _probe_stored(monkeypatch, kernel_request(k=k, dtype=dtype, traits=frozenset(traits)), honest)


@pytest.mark.fault("B102")
@pytest.mark.parametrize("op", ["linear", "linears", "linear_add", "linear_swiglu", "norm_linears"])
@pytest.mark.usefixtures("on_a_hopper")
def test_an_honest_streaming_kernel_passes(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    _probe_stream(monkeypatch, kernel_request(op))


@pytest.mark.parametrize("row", FAULTS)
@pytest.mark.parametrize("k", [64, 176])
def test_a_faulty_kernel_without_repack_fails(monkeypatch: pytest.MonkeyPatch, row: Row, k: int) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stored(monkeypatch, kernel_request(k=k), row)


@pytest.mark.parametrize("row", FAULTS)
@pytest.mark.parametrize("op", ["linear", "norm_linear_swiglu"])
@pytest.mark.usefixtures("on_a_hopper")
def test_a_faulty_streaming_kernel_fails(monkeypatch: pytest.MonkeyPatch, row: Row, op: str) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stream(monkeypatch, kernel_request(op), row=row)


@pytest.mark.fault("B05")
@pytest.mark.parametrize("op", ["linears", "linear_swiglu"])
@pytest.mark.usefixtures("on_a_hopper")
def test_a_kernel_that_takes_one_global_scale_for_all_parts_fails(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stream(monkeypatch, kernel_request(op), row=_scale_of_the_largest)


@pytest.mark.fault("B10")
def test_a_float16_kernel_that_rounds_the_sums_of_long_rows_before_the_global_scale_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = kernel_request(k=17408, dtype="float16", tokens=(1, 2))
    _probe_stored(monkeypatch, request, honest)
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stored(monkeypatch, request, overflowing)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("split", [1, 8, 16])
@pytest.mark.usefixtures("on_a_hopper")
def test_a_kernel_whose_rows_depend_on_the_number_of_tokens_fails(
    monkeypatch: pytest.MonkeyPatch, split: int
) -> None:
    request = kernel_request(k=1024, tokens=(1, 32))
    with pytest.raises(VtensorsError, match=r"rows at M = \d+ differ from those at M = 1"):
        _probe_stream(monkeypatch, request, split=split)


@pytest.mark.fault("B02")
@pytest.mark.parametrize("paired", [False, True])
def test_a_repack_that_moves_block_scales_fails(monkeypatch: pytest.MonkeyPatch, paired: bool) -> None:
    def pack(weights: list[NVFP4Weight], *, paired: bool = False) -> PackedNVFP4:
        moved = pack_reference(weights, paired=paired)
        blocks = moved.blocks.clone()
        blocks[..., 1024:] = moved.blocks[..., 1024:].roll(2, dims=-1)
        return attrs.evolve(moved, blocks=blocks)

    monkeypatch.setattr(repack, "pack", pack)
    monkeypatch.setattr(packed_widening, "bind_linear", _unused)
    monkeypatch.setattr(packed_widening, "bind_linear_swiglu", _unused)
    with pytest.raises(VtensorsError, match="the repacked bytes differ"):
        probes.probe_packed_widening(kernel_request("linear_swiglu" if paired else "linear"))


@pytest.mark.fault("B102")
def test_a_gather_of_swapped_nibbles_fails_though_it_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(weight: NVFP4Weight) -> Callable[..., Tensor]:
        def call(ids: Tensor, dtype: torch.dtype, out: Tensor) -> Tensor:
            return out.copy_(weight.dequantize(torch.float32)[ids] * (1 + 2**-7))

        return call

    monkeypatch.setattr(embedding, "bind_embedding", bind)
    with pytest.raises(VtensorsError, match="the rows differ"):
        probes.probe_embedding(kernel_request("embedding"))


def _unused(*_: Any) -> Any:
    raise AssertionError("the bytes are compared first")
