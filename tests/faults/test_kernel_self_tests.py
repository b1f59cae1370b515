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
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4 import embedding, packed_widening, probes, repack, stored, stream_probe
from vtensors_kernels.nvfp4.activations import scaled_x
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.reference.nvfp4_packing import pack_reference, unpack_reference
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

# (x [1, K] float32, matrix [N, K] float32 without its scale, scale [N]) -> [1, N] float32.
Row = Callable[[Tensor, Tensor, Tensor], Tensor]


def _honest(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T) * scale


def _overflowing(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T).to(torch.float16).float() * scale


def _missed_reciprocal(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T) / scale


def _scale_of_the_largest(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return (x @ matrix.T) * scale.max()


def _swapped_nibbles(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return _honest(x, matrix.reshape(matrix.shape[0], -1, 2).flip(-1).reshape(matrix.shape), scale)


def _miscompiled(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """Bytes of a word in the other order: codes of 8 columns."""
    words = matrix.reshape(matrix.shape[0], -1, 4, 2).flip(-2)
    return _honest(x, words.reshape(matrix.shape), scale)


def _of_another_row(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return _honest(x, matrix, scale).roll(1, dims=-1)


def _unwritten_tail(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    y = _honest(x, matrix, scale)
    y[:, -1] = float("nan")
    return y


FAULTS = [
    pytest.param(_missed_reciprocal, id="reciprocal", marks=pytest.mark.fault("B01")),
    pytest.param(_swapped_nibbles, id="nibbles", marks=pytest.mark.fault("B17")),
    pytest.param(_miscompiled, id="bytes of a word", marks=pytest.mark.fault("B83")),
    pytest.param(_of_another_row, id="another row", marks=pytest.mark.fault("B102")),
    pytest.param(_unwritten_tail, id="unwritten", marks=pytest.mark.fault("B102")),
]


def _request(op: str = "linear", *, k: int = 128, dtype: str = "bfloat16", **changes: Any) -> KernelRequest:
    plain = KernelRequest(
        op=op,
        scheme="nvfp4",
        activations="16bit",
        device="cpu",
        dtype=dtype,
        shape=(5120, k),
        parts=(2560, 2560) if op.endswith(("swiglu", "linears")) else (5120,),
        tokens=(1, 12),
    )
    return attrs.evolve(plain, **changes)


def _by_rows(row: Row, x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """float32 [M, N], each row by itself, so that its bits do not depend on M."""
    return torch.cat([row(one.reshape(1, -1), matrix, scale) for one in x.float()])


def _stored_linear(row: Row) -> Callable[..., Callable[..., Tensor]]:
    """What `stored.bind_linear` gives, by that arithmetic."""

    def bind(weight: NVFP4Weight, dtype: torch.dtype, **_: Any) -> Callable[..., Tensor]:
        total = weight.global_scale
        assert total is not None
        matrix = attrs.evolve(weight, global_scale=torch.tensor(1.0)).dequantize(torch.float32)
        scale = total.reshape(-1).expand(weight.shape[0])

        def call(x: Tensor, out: Tensor | None = None) -> Tensor:
            y = _by_rows(row, scaled_x(x, weight.pre_scale), matrix, scale)
            y = y if weight.bias is None else y + weight.bias
            return y.to(dtype) if out is None else out.copy_(y)

        return call

    return bind


class _Stream:
    """`StreamLinear`, by that arithmetic. split: rows are summed in two parts where there are more tokens."""

    def __init__(
        self,
        packed: PackedNVFP4,
        dtype: torch.dtype,
        epilogue: str = "linear",
        prologue: str | None = None,
        *,
        row: Row = _honest,
        split: int | None = None,
        **_: Any,
    ) -> None:
        self._row, self._split, self._epilogue, self._packed = row, split, epilogue, packed
        self._scale = packed.row_scale[: packed.shape[0]] / 256
        if packed.paired:
            order = unpack_reference(attrs.evolve(packed, row_scale=torch.full_like(packed.row_scale, 256.0)))
            gate, up = (packed.row_scale.reshape(-1, 2, 8)[:, i].reshape(-1) / 256 for i in (0, 1))
            half = packed.shape[0] // 2
            self._matrix, self._scale = order, torch.cat([gate[:half], up[:half]])
        else:
            bare = attrs.evolve(packed, row_scale=torch.full_like(packed.row_scale, 256.0))
            self._matrix = unpack_reference(bare)
        n = packed.shape[0]
        self.out_features = n // 2 if packed.paired else n

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gain: Tensor | None = None,
        eps: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        m = x.shape[0]
        x = x if gain is None else rms_norm(x, gain, eps, zero_centered=False)
        y = _by_rows(self._row, x, self._matrix, self._scale)
        if self._split is not None and m > self._split:
            half = x.shape[1] // 2
            halves = [(x[:, :half], self._matrix[:, :half]), (x[:, half:], self._matrix[:, half:])]
            one, two = (_by_rows(self._row, part, matrix, self._scale) for part, matrix in halves)
            y = one + two
        if self._packed.paired:
            y = swiglu(*y.chunk(2, dim=-1))
        y = y if residual is None else y + residual.float()
        return y.to(x.dtype) if out is None else out.copy_(y)


@pytest.fixture
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms as an H200 gets them, few launches, the packing of the twin."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(stream_probe, "REPLAYS", 2)
    monkeypatch.setattr(stream_probe, "pack", pack_reference)


def _probe_stream(monkeypatch: pytest.MonkeyPatch, request: KernelRequest, **fault: Any) -> None:
    monkeypatch.setattr(stream_probe, "StreamLinear", partial(_Stream, **fault))
    stream_probe.probe_stream(attrs.evolve(request, capability=(9, 0)))


def _probe_stored(monkeypatch: pytest.MonkeyPatch, request: KernelRequest, row: Row) -> None:
    monkeypatch.setattr(stored, "bind_linear", _stored_linear(row))
    probes.probe_linear_stored(request)


@pytest.mark.fault("B102")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("traits", [(), ("bias", "row_scale"), ("pre_scale",)], ids=str)
@pytest.mark.parametrize("k", [64, 176])
def test_an_honest_kernel_without_repack_passes(
    monkeypatch: pytest.MonkeyPatch, k: int, traits: tuple[str, ...], dtype: str
) -> None:
    _probe_stored(monkeypatch, _request(k=k, dtype=dtype, traits=frozenset(traits)), _honest)


@pytest.mark.fault("B102")
@pytest.mark.parametrize("op", ["linear", "linears", "linear_add", "linear_swiglu", "norm_linears"])
@pytest.mark.usefixtures("on_a_hopper")
def test_an_honest_streaming_kernel_passes(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    _probe_stream(monkeypatch, _request(op))


@pytest.mark.parametrize("row", FAULTS)
@pytest.mark.parametrize("k", [64, 176])
def test_a_faulty_kernel_without_repack_fails(monkeypatch: pytest.MonkeyPatch, row: Row, k: int) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stored(monkeypatch, _request(k=k), row)


@pytest.mark.parametrize("row", FAULTS)
@pytest.mark.parametrize("op", ["linear", "norm_linear_swiglu"])
@pytest.mark.usefixtures("on_a_hopper")
def test_a_faulty_streaming_kernel_fails(monkeypatch: pytest.MonkeyPatch, row: Row, op: str) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stream(monkeypatch, _request(op), row=row)


@pytest.mark.fault("B05")
@pytest.mark.parametrize("op", ["linears", "linear_swiglu"])
@pytest.mark.usefixtures("on_a_hopper")
def test_a_kernel_that_takes_one_global_scale_for_all_parts_fails(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stream(monkeypatch, _request(op), row=_scale_of_the_largest)


@pytest.mark.fault("B10")
def test_a_float16_kernel_that_rounds_the_sums_of_long_rows_before_the_global_scale_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = _request(k=17408, dtype="float16", tokens=(1, 2))
    _probe_stored(monkeypatch, request, _honest)
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe_stored(monkeypatch, request, _overflowing)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("split", [1, 8, 16])
@pytest.mark.usefixtures("on_a_hopper")
def test_a_kernel_whose_rows_depend_on_the_number_of_tokens_fails(
    monkeypatch: pytest.MonkeyPatch, split: int
) -> None:
    request = _request(k=1024, tokens=(1, 32))
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
        probes.probe_packed_widening(_request("linear_swiglu" if paired else "linear"))


@pytest.mark.fault("B102")
def test_a_gather_of_swapped_nibbles_fails_though_it_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(weight: NVFP4Weight) -> Callable[..., Tensor]:
        def call(ids: Tensor, dtype: torch.dtype, out: Tensor) -> Tensor:
            return out.copy_(weight.dequantize(torch.float32)[ids] * (1 + 2**-7))

        return call

    monkeypatch.setattr(embedding, "bind_embedding", bind)
    with pytest.raises(VtensorsError, match="the rows differ"):
        probes.probe_embedding(_request("embedding"))


def _unused(*_: Any) -> Any:
    raise AssertionError("the bytes are compared first")
