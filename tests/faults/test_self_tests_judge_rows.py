"""The self-tests of the NVFP4 kernels tell flushed block scales, swapped nibbles and overflows at any K.

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
from fake_kernels import (
    Stream,
    Wgmma,
    Widener,
    honest,
    kernel_request,
    overflowing,
    overflowing_packed,
    stored_linear,
    swapped_nibbles,
)
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight, e4m3
from vtensors_kernels import widening, widening_probe
from vtensors_kernels.nvfp4 import packed_widening, probes, repack, stored, stream_probe, wgmma_probe
from vtensors_kernels.nvfp4.row_probe import ROWS, RowCase
from vtensors_kernels.reference.nvfp4_packing import pack_reference

KERNELS = ["stream", "wgmma", "packed_widening", "stored", "widening"]
COLUMNS = [16, 272, 5120, 17408]
DTYPES = ["bfloat16", "float16"]
# Of the positive numbers of E4M3, and the least of these.
BINADES = 18
SMALLEST = 2.0**-9


@pytest.fixture(autouse=True)
def _on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms as an H200 gets them, few launches, the packing of the twin."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(stream_probe, "REPLAYS", 1)
    monkeypatch.setattr(stream_probe, "_ROUNDS", 0)
    for module in (stream_probe, wgmma_probe, repack):
        monkeypatch.setattr(module, "pack", pack_reference)
    widening_probe._probe_nvfp4.cache_clear()


def _probe(monkeypatch: pytest.MonkeyPatch, kernel: str, request: KernelRequest, **fault: Any) -> None:
    """The self-test of that kernel, given one with that fault: row, least or none."""
    if kernel == "stream":
        monkeypatch.setattr(stream_probe, "StreamLinear", partial(Stream, **fault))
        stream_probe.probe_stream(attrs.evolve(request, capability=(9, 0), tokens=(1, 2)))
    elif kernel == "wgmma":
        monkeypatch.setattr(wgmma_probe, "WgmmaLinear", partial(Wgmma, **fault))
        wgmma_probe.probe_wgmma_rows(attrs.evolve(request, tokens=(33, 40)))
    elif kernel == "packed_widening":
        for name, epilogue in (("", "linear"), ("_add", "linear_add"), ("_swiglu", "linear_swiglu")):
            bind = partial(Stream, epilogue=epilogue, **fault)
            monkeypatch.setattr(packed_widening, f"bind_linear{name}", bind)
        probes.probe_packed_widening(request)
    elif kernel == "stored":
        monkeypatch.setattr(stored, "bind_linear", stored_linear(**{"row": honest, **fault}))
        probes.probe_linear_stored(attrs.evolve(request, tokens=(1, 2)))
    else:
        _fake_widening(monkeypatch, **fault)
        widening_probe.probe_nvfp4(request)


def _fake_widening(
    monkeypatch: pytest.MonkeyPatch, row: Callable[..., Tensor] = honest, least: float = 0.0
) -> None:
    swaps = row is swapped_nibbles
    row = honest if swaps else row
    monkeypatch.setattr(widening, "NVFP4Widener", partial(Widener, least=least, swaps=swaps))
    monkeypatch.setattr(
        widening, "float32_product", lambda x, matrix: row(x.float(), matrix.float(), torch.ones(()))
    )
    monkeypatch.setattr(
        widening,
        "scaled_product",
        lambda x, matrix, scale: row(x.float(), matrix.float(), torch.tensor(scale)).to(x.dtype),
    )


@pytest.mark.fault("B102")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_right_kernel_passes(monkeypatch: pytest.MonkeyPatch, kernel: str, k: int, dtype: str) -> None:
    _probe(monkeypatch, kernel, kernel_request(k=k, dtype=dtype))


@pytest.mark.fault("B102")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("k", "traits"),
    [
        (16, ("bias", "row_scale")),
        (16, ("pre_scale", "row_scale")),
        (32, ("group32",)),
        (272, ("bias", "pre_scale")),
        (288, ("bias", "group32", "pre_scale", "row_scale")),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_right_kernel_passes_whatever_the_weight_brings(
    monkeypatch: pytest.MonkeyPatch, kernel: str, k: int, traits: tuple[str, ...], dtype: str
) -> None:
    _probe(monkeypatch, kernel, kernel_request(k=k, dtype=dtype, traits=frozenset(traits)))


@pytest.mark.fault("B102")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "op", ["linears", "linear_add", "linear_swiglu", "norm_linears", "norm_linear_swiglu"]
)
@pytest.mark.parametrize("kernel", ["stream", "wgmma", "packed_widening"])
def test_a_right_kernel_of_another_op_passes(
    monkeypatch: pytest.MonkeyPatch, kernel: str, op: str, dtype: str
) -> None:
    op = op if kernel == "stream" else op.removeprefix("norm_")
    for k in (16, 272):
        for traits in ((), ("bias", "row_scale")):
            _probe(monkeypatch, kernel, kernel_request(op, k=k, dtype=dtype, traits=frozenset(traits)))


@pytest.mark.fault("B09")
@pytest.mark.parametrize("least", [2 * SMALLEST, 2.0**-6, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_flushes_small_block_scales_fails(
    monkeypatch: pytest.MonkeyPatch, kernel: str, k: int, dtype: str, least: float
) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe(monkeypatch, kernel, kernel_request(k=k, dtype=dtype), least=least)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("op", ["linears", "linear_add", "linear_swiglu"])
@pytest.mark.parametrize("kernel", ["stream", "wgmma", "packed_widening"])
def test_a_kernel_of_another_op_that_flushes_small_block_scales_fails(
    monkeypatch: pytest.MonkeyPatch, kernel: str, op: str
) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe(monkeypatch, kernel, kernel_request(op, k=272), least=2.0**-6)


@pytest.mark.fault("B10")
@pytest.mark.parametrize("row", [overflowing, overflowing_packed])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_rounds_sums_to_float16_before_the_global_scale_fails(
    monkeypatch: pytest.MonkeyPatch, kernel: str, k: int, dtype: str, row: Callable[..., Tensor]
) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe(monkeypatch, kernel, kernel_request(k=k, dtype=dtype), row=row)


@pytest.mark.fault("B17")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_swaps_nibbles_fails(
    monkeypatch: pytest.MonkeyPatch, kernel: str, k: int, dtype: str
) -> None:
    with pytest.raises(VtensorsError, match="self-test failed"):
        _probe(monkeypatch, kernel, kernel_request(k=k, dtype=dtype), row=swapped_nibbles)


@pytest.mark.fault("B102")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trait", ["bias", "pre_scale", "row_scale"])
def test_a_widening_kernel_that_forgets_what_a_weight_brings_fails(
    monkeypatch: pytest.MonkeyPatch, trait: str, dtype: str
) -> None:
    def forgetful(weight: NVFP4Weight) -> widening.LinearCall:
        scale = weight.global_scale
        assert scale is not None
        first = scale.reshape(-1)[:1].reshape(())
        changes = {"row_scale": {"global_scale": first}}.get(trait, {trait: None})
        return widening.bind_nvfp4(attrs.evolve(weight, **changes))

    request = kernel_request(k=272, dtype=dtype, traits=frozenset({trait}))
    _fake_widening(monkeypatch)
    widening_probe.probe_nvfp4(request)
    widening_probe._probe_nvfp4.cache_clear()
    monkeypatch.setattr(widening_probe, "bind_nvfp4", forgetful)
    with pytest.raises(VtensorsError, match="self-test failed"):
        widening_probe.probe_nvfp4(request)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("groups", [1, 17, 320])
def test_rows_have_every_positive_scale_and_each_row_those_of_one_binade(groups: int, group: int) -> None:
    traits = frozenset({"group32"} if group == 32 else ())
    case = RowCase.make(kernel_request("linear_swiglu", k=group * groups, traits=traits))
    for part in case.parts:
        assert part.group == group
        scales = e4m3.as_bytes(part.block_scale)
        assert set(scales.flatten().tolist()) == set(range(1, 127))
        binades = part.block_scale.float().log2().floor()
        assert torch.equal(binades, binades[:, :1].expand_as(binades))
        assert len(set(binades[:, 0].tolist())) == BINADES


@pytest.mark.fault("B10")
@pytest.mark.parametrize("traits", [(), ("bias", "pre_scale", "row_scale")], ids=str)
@pytest.mark.parametrize("op", ["linear", "linear_add", "linear_swiglu", "norm_linears"])
@pytest.mark.parametrize("k", [16, 272, 5120])
def test_outputs_are_normal_float16_though_the_sums_are_not(op: str, k: int, traits: tuple[str, ...]) -> None:
    case = RowCase.make(kernel_request(op, k=k, dtype="float16", traits=frozenset(traits)))
    norms = case.wanted.square().mean(0).sqrt()
    assert case.wanted.abs().max() < 65504
    assert norms.min() > 2.0**-8
    assert op == "linear_swiglu" or norms.min() < 2.0**-5
    assert case.wanted.shape == (case.x.shape[0], ROWS * (2 if op == "norm_linears" else 1))
