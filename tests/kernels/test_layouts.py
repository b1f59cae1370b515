"""Bytes of a prepared weight from its shape are those of the weight."""

from __future__ import annotations

import attrs
import pytest
import torch

from fp8_cases import make_fp8
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.fp8 import packed as fp8
from vtensors_kernels.layouts import prepared_bytes
from vtensors_kernels.nvfp4.packed import LAYOUT, PAIRED_LAYOUT
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference
from vtensors_kernels.reference.nvfp4_packing import pack_reference


def _request(n: int, k: int, *traits: str) -> KernelRequest:
    return KernelRequest(
        op="linear", scheme="nvfp4", activations="16bit", device="cpu", shape=(n, k), traits=frozenset(traits)
    )


def _weight(n: int, k: int) -> NVFP4Weight:
    return quantize_nvfp4(torch.linspace(-1, 1, n * k).reshape(n, k))


@pytest.mark.parametrize(("n", "k"), [(16, 128), (40, 48), (1, 16), (33, 400)])
def test_the_packed_layout_tells_its_size_from_its_shape(n: int, k: int) -> None:
    packed = pack_reference([_weight(n, k)])
    assert prepared_bytes(LAYOUT, _request(n, k), stored=0) == packed.nbytes


@pytest.mark.parametrize(("f", "k"), [(8, 128), (20, 48), (1, 16), (33, 400)])
def test_paired_rows_take_what_their_shape_tells(f: int, k: int) -> None:
    packed = pack_reference([_weight(f, k), _weight(f, k)], paired=True)
    assert prepared_bytes(PAIRED_LAYOUT, _request(2 * f, k), stored=0) == packed.nbytes


@pytest.mark.parametrize("kind", ["tensor", "row", "block", "mx"])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (40, 64), (33, 416)])
def test_the_packed_fp8_layout_too(n: int, k: int, kind: str) -> None:
    weight = make_fp8(kind, n, k)
    request = KernelRequest(
        op="linear", scheme=weight.scheme, activations="16bit", device="cpu", shape=(n, k), parts=(n,)
    )
    assert prepared_bytes(fp8.LAYOUT, request, stored=0) == pack_fp8_reference([weight]).nbytes
    nvfp4 = attrs.evolve(request, scheme="nvfp4")
    assert prepared_bytes(fp8.LAYOUT, nvfp4, stored=0) is None


def test_bias_and_pre_scale_count() -> None:
    plain = _weight(40, 48)
    weight = NVFP4Weight(
        codes=plain.codes,
        block_scale=plain.block_scale,
        global_scale=plain.global_scale,
        bias=torch.ones(40),
        pre_scale=torch.ones(48),
    )
    assert (
        prepared_bytes(LAYOUT, _request(40, 48, "bias", "pre_scale"), stored=0)
        == pack_reference([weight]).nbytes
    )


def test_a_stored_weight_keeps_its_size_and_a_layout_of_others_is_not_guessed() -> None:
    assert prepared_bytes("stored", _request(16, 128), stored=1234) == 1234
    assert prepared_bytes("theirs", _request(16, 128), stored=1234) is None
    unknown = KernelRequest(op="linear", scheme="nvfp4", activations="16bit", device="cpu")
    assert prepared_bytes(LAYOUT, unknown, stored=1234) is None
