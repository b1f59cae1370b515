"""Weights in the layouts of kernels: every scale in its place, each part under its own, prepared once, kept once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import IDS, load, modelopt_layers, nvfp4, plain_tensors, quantised, write_model
from torch import Tensor

from fake_plugins import candidate, module
from kernel_specs import chosen, kernel, request
from tiny_decoders import tiny_config
from vtensors.errors import RequestError
from vtensors.kernel_binding import bind_plan
from vtensors.manager import Plugins
from vtensors.records import KernelRequest
from vtensors.selection import plan_kernels
from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_kernels.layouts import prepared_bytes
from vtensors_kernels.nvfp4 import packed_widening
from vtensors_kernels.nvfp4.packed import LAYOUT, PAIRED_LAYOUT
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference, unpack_fp8_reference
from vtensors_kernels.reference.nvfp4_packing import pack_reference, unpack_reference

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
# N x K of the fused matrices of Qwen3.5-27B.
LARGE = [(34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (248320, 5120)]
SIZES = [(n, k) for n in (7, 8, 32, 48, 96, 4304) for k in (64, 176)] + [(8, 4304)]


def weight_of(n: int, k: int, *, codes: int | None = None, scale: float = 0.25) -> NVFP4Weight:
    """[N, K], random codes or all the same byte; every row and every group has a scale that tells its place."""
    source = torch.Generator().manual_seed(n * k)
    places = (torch.arange(n).reshape(-1, 1) % 100) + torch.arange(k // 16) % 19 + 8
    bytes_ = torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8)
    return NVFP4Weight(
        codes=bytes_ if codes is None else torch.full_like(bytes_, codes),
        block_scale=places.to(torch.uint8).view(E4M3),
        global_scale=torch.tensor(scale),
    )


@pytest.mark.fault("B02")
def test_each_packed_row_keeps_its_own_linear_block_scales_and_the_stored_ones_stay_as_they_are() -> None:
    weight = weight_of(256, 128, codes=0x22)
    kept = weight.block_scale.clone()
    wanted = weight.block_scale.float().repeat_interleave(16, 1) * 0.25
    for _ in range(2):
        assert torch.equal(unpack_reference(pack_reference([weight])), wanted)
    assert torch.equal(weight.block_scale.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.fault("B02")
def test_kernels_of_one_layout_share_one_preparation_and_others_get_the_weight_as_stored() -> None:
    prepared: list[Sequence[Any]] = []
    given: dict[str, Any] = {}

    def prepare(weights: Sequence[Any], asked: KernelRequest) -> tuple[str, Any]:
        prepared.append(weights)
        return "packed", weights[0]

    def bound_by(name: str) -> Callable[[Any, KernelRequest], Callable[..., Any]]:
        def bind(weight: Any, asked: KernelRequest) -> Callable[..., Any]:
            given[name] = weight
            return lambda x: name

        return bind

    kernels = [
        kernel(
            name,
            layout=layout,
            tokens=tokens,
            prepare=prepare if layout != "stored" else None,
            bind=bound_by(name),
        )
        for name, layout, tokens in (
            ("linear_few", "packed", (1, 32)),
            ("linear_some", "packed", (33, 64)),
            ("linear_many", "stored", (65, None)),
        )
    ]
    plan = plan_kernels(request(), kernels)
    assert len(chosen(plan)) == 3
    bind_plan(plan, ["weight"])
    assert prepared == [["weight"]]
    assert given == {
        "linear_few": ("packed", "weight"),
        "linear_some": ("packed", "weight"),
        "linear_many": "weight",
    }


@pytest.mark.fault("B02")
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kernel_of", ["stream", "wgmma", "packed_widening"])
def test_a_matrix_packed_for_one_op_is_refused_by_kernels_of_the_other(kernel_of: str, paired: bool) -> None:
    parts = [weight_of(32, 64), weight_of(32, 64)]
    packed = pack_reference(parts, paired=paired)
    epilogue = "linear" if paired else "linear_swiglu"
    makers: dict[str, Callable[[], Any]] = {
        "stream": lambda: StreamLinear(packed, BF16, epilogue),
        "wgmma": lambda: WgmmaLinear(packed, BF16, epilogue),
        "packed_widening": lambda: (
            packed_widening.bind_linear(packed, BF16)
            if paired
            else packed_widening.bind_linear_swiglu(packed, BF16)
        ),
    }
    with pytest.raises(RequestError, match="paired"):
        makers[kernel_of]()


@pytest.mark.fault("B05")
@pytest.mark.parametrize("paired", [False, True])
def test_parts_that_are_packed_together_keep_their_own_global_scales(paired: bool) -> None:
    ones = torch.ones(20, 4).to(E4M3)
    parts = [
        NVFP4Weight(codes=torch.full((20, 32), 0x22, dtype=torch.uint8), block_scale=ones, global_scale=scale)
        for scale in (torch.tensor(1 / 256), torch.tensor(1 / 384))
    ]
    found = unpack_reference(pack_reference(parts, paired=paired))
    assert torch.equal(found[:20], torch.full((20, 64), 1 / 256))
    assert torch.equal(found[20:], torch.full((20, 64), 1 / 384))


@pytest.mark.fault("B09")
def test_every_block_scale_has_a_byte_of_its_own_in_the_packed_layout() -> None:
    every = torch.arange(1, 127, dtype=torch.uint8).reshape(-1, 1)  # 0x01 = 2^-9 to 0x7E = 448
    codes = torch.full((126, 8), 0x22, dtype=torch.uint8)
    weight = NVFP4Weight(codes=codes, block_scale=every.view(E4M3), global_scale=torch.tensor(1.0))
    assert torch.equal(unpack_reference(pack_reference([weight])), every.view(E4M3).float().expand(126, 16))


@pytest.mark.fault("B14")
def test_block_scales_that_are_no_powers_of_two_are_packed_as_they_are() -> None:
    codes = (torch.arange(256 * 256) % 127).to(torch.uint8).reshape(256, 256).view(E4M3)
    scale = torch.tensor([[0.0021, 0.0033], [0.0047, 0.0021]])
    weight = FP8Weight(codes=codes, scale=scale, block=(128, 128))
    wanted = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = unpack_fp8_reference(pack_fp8_reference([weight]))
    torch.testing.assert_close(found, wanted, rtol=2**-22, atol=0)


def _request(n: int, k: int) -> KernelRequest:
    return KernelRequest(
        op="linear", scheme="nvfp4", activations="16bit", device="cuda:0", shape=(n, k), parts=(n,)
    )


@pytest.mark.fault("B69")
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_odd_sizes_are_padded_in_the_packed_layout_and_the_padding_is_counted(n: int, k: int) -> None:
    weight = weight_of(n, k)
    packed = pack_reference([weight])
    assert torch.equal(unpack_reference(packed), weight.dequantize(torch.float32))
    assert packed.nbytes == prepared_bytes(LAYOUT, _request(n, k), weight.nbytes)


@pytest.mark.fault("B91")
@pytest.mark.parametrize(("n", "k"), LARGE)
@pytest.mark.parametrize("layout", [LAYOUT, PAIRED_LAYOUT])
def test_a_packed_weight_of_a_large_model_is_as_large_as_the_stored_one(n: int, k: int, layout: str) -> None:
    stored = n * k // 2 + n * k // 16 + 4
    found = prepared_bytes(layout, _request(n, k), stored)
    assert found is not None
    # Four bytes more a row, for its global scale.
    assert stored <= found <= stored + 4 * (n + 16)


@pytest.mark.fault("B91")
def test_a_weight_that_a_kernel_has_prepared_is_not_kept_as_stored_too(tmp_path: Path) -> None:
    config = tiny_config("llama")
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(2) for part in ("gate", "up", "down")]
    tensors = plain_tensors(config)
    own = {name: nvfp4(name, tensors[f"{name}.weight"]) for name in names}
    folder = write_model(
        tmp_path / "m",
        config,
        quantised(tensors, own),
        quantization=modelopt_layers(dict.fromkeys(names, "NVFP4")),
    )
    stored: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    def alive() -> int:
        gc.collect()
        return sum(one() is not None for one in stored)

    def prepare(weights: Sequence[Any], asked: KernelRequest) -> Tensor:
        stored.extend(weakref.ref(weight.codes) for weight in weights)
        most.append(alive())
        dense: Tensor = weights[0].dequantize(torch.float32)
        return dense

    def bind(prepared: Tensor, asked: KernelRequest) -> Callable[..., Any]:
        return lambda x: x @ prepared.t()

    fast = kernel("linear_packed", targets=("cpu",), layout="dense", prepare=prepare, bind=bind)
    plugin = module("fast", {"vtensors_kernels": lambda: [fast]})
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})
    model = load(folder, plugins=plugins)
    assert len(stored) == len(names)
    # gate and up are read together; of other layers nothing is left.
    assert max(most) <= 2
    assert alive() == 0
    torch.testing.assert_close(model.logits(IDS), load(folder).logits(IDS), rtol=0, atol=1e-4)
