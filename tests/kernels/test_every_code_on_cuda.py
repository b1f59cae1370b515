"""Every E4M3 code, and every E2M1 code times every block scale: kernels for quantized activations, and experts.

Each output has one product that is not zero and is exact in 16 bits, so that it must be the reference's bit for bit.
What stream, wgmma, stored and the widening kernels make of them is tested beside each of those.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from torch import Tensor

from fp8_cases import KINDS, every_code
from nvfp4_cuda_cases import HALVES, every_code_and_scale, poisoned
from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight
from vtensors_formats.activations import ActivationQuantizer, FP4Activation, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_formats.weight import Weight
from vtensors_kernels.activation_quantizers.linears import QuantizedInputMatrix, QuantizedStream
from vtensors_kernels.experts.launches import GroupedExperts
from vtensors_kernels.experts.packed import pack_experts
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.stacked import stack_fp8
from vtensors_kernels.fp8.w8a8 import W8A8Linear
from vtensors_kernels.nvfp4 import packed_widening
from vtensors_kernels.nvfp4.emulated_w4a4 import pack_emulated, widening_quantizer
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stream import StreamLinear
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments

pytestmark = pytest.mark.gpu

STATIC = FP8StaticActivation(scale=torch.ones(()))
# What a weight of each kind may declare.
DECLARED: tuple[tuple[str, ActivationQuantizer], ...] = (
    ("tensor", STATIC),
    ("tensor", FP8TokenActivation()),
    ("row", STATIC),
    ("row", FP8TokenActivation()),
    ("block", FP8GroupActivation()),
    ("mx", MXFP8Activation()),
)
NATIVE = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8 tensor cores"
)
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="sm_90 alone"
)


def check_columns(
    call: Callable[[Tensor], Tensor], wanted: Tensor, dtype: torch.dtype, rows: int = 32
) -> None:
    """wanted [K, N]: what x of one 1 a row must give, so many rows at a time."""
    eye = torch.eye(len(wanted), device="cuda", dtype=dtype)
    for first in range(0, len(wanted), rows):
        ours = call(eye[first : first + rows]).float()
        different = (ours != wanted[first : first + rows]).nonzero().tolist()
        assert not different, (
            f"{len(different)} of {ours.numel()} differ, the first at {different[0]} + {first}"
        )


@HOPPER
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "block"])
def test_every_fp8_code_by_warpgroup_products(kind: str, dtype: torch.dtype) -> None:
    weight = every_code(kind).to("cuda")
    call = WgmmaSegments(pack_fp8([weight]), dtype)
    for rows in (17, 32, 64):
        check_columns(
            lambda x: call(x, None, poisoned(len(x), 16, dtype=dtype)), weight.dequantize().T, dtype, rows
        )


@NATIVE
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("kind", "activation"), DECLARED[:4])
def test_every_fp8_code_by_fp8_tensor_cores(
    kind: str, activation: ActivationQuantizer, dtype: torch.dtype
) -> None:
    weight = attrs.evolve(every_code(kind), activation=activation).to("cuda")
    check_columns(W8A8Linear(stack_fp8([weight]), dtype), weight.dequantize().T, dtype)


@HOPPER
@pytest.mark.parametrize("dtype", HALVES)
def test_every_fp8_code_by_fp8_tensor_cores_under_scales_of_blocks(dtype: torch.dtype) -> None:
    codes = every_code().stored()[0].view(torch.uint8).repeat(8, 2).view(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 0.5, 2.0, 0.25]])
    weight = FP8Weight(codes=codes, scale=scale, block=(128, 128), activation=FP8GroupActivation()).to("cuda")
    check_columns(W8A8Linear(stack_fp8([weight]), dtype), weight.dequantize().T, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("kind", "activation"), DECLARED)
def test_every_fp8_code_times_quantized_activations(
    kind: str, activation: ActivationQuantizer, dtype: torch.dtype
) -> None:
    weight = every_code(kind).to("cuda")
    matrix = QuantizedInputMatrix(packed=pack_fp8([weight]), activation=activation.to("cuda"))
    check_columns(QuantizedStream(matrix, dtype), weight.dequantize().T, dtype)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("dtype", HALVES)
def test_every_nvfp4_code_and_scale_times_quantized_activations(dtype: torch.dtype) -> None:
    weight = every_code_and_scale()
    wanted, x = weight.dequantize().T, torch.eye(16, device="cuda", dtype=dtype)
    eight = QuantizedInputMatrix(packed=pack([weight]), activation=STATIC.to("cuda"))
    assert torch.equal(QuantizedStream(eight, dtype)(x).float(), wanted)

    # A group whose largest value is 6 gets scale 1 and code 6.
    four = FP4Activation(global_scale=torch.ones((), device="cuda"))
    emulated = pack_emulated([attrs.evolve(weight, activation=four)])
    quantized, _ = widening_quantizer(emulated, dtype, norm=False)(6 * x)
    assert torch.equal(quantized, 6 * x)
    calls = [StreamLinear(emulated.packed, dtype), packed_widening.bind_linear(emulated.packed, dtype)]
    if torch.cuda.get_device_capability() == (9, 0):
        calls += [WgmmaSegments(emulated.packed, dtype), WgmmaLinear(emulated.packed, dtype)]
    for call in calls:
        assert torch.equal(call(quantized).float(), 6 * wanted), type(call).__name__


# ---- experts


def coded(kind: str, values: Tensor) -> Weight:
    """Values that are E4M3 numbers, under scales of 1; for `nvfp4` those that are small powers of two or 0."""
    if kind == "nvfp4":
        # Code 2 is 1, and a block's scale its largest value.
        rows, columns = values.shape
        scale = values.reshape(rows, columns // 16, 16).amax(-1)
        bits = (values != 0).to(torch.uint8) * 2
        return NVFP4Weight(
            codes=bits[:, ::2] | bits[:, 1::2] << 4,
            block_scale=scale.to(torch.float8_e4m3fn),
            global_scale=torch.ones(()),
        )
    codes = values.to(torch.float8_e4m3fn)
    if kind == "mx":
        return MXFP8Weight(
            codes=codes, scale=torch.full((len(codes), codes.shape[1] // 32), 127).to(torch.uint8)
        )
    n, k = codes.shape
    shape: tuple[int, ...] = {"tensor": (), "row": (n, 1), "block": (n // 128, k // 128)}[kind]
    return FP8Weight(codes=codes, scale=torch.ones(shape), block=(128, 128) if kind == "block" else None)


def every_value(kind: str, n: int, k: int) -> Weight:
    """[N, K] with every code, for NVFP4 times every block scale: over the rows, in the first columns at least."""
    if kind == "nvfp4":
        some = every_code_and_scale().to("cpu")
        codes = torch.zeros(n, k // 2, dtype=torch.uint8)
        scale = torch.zeros(n, k // 16, dtype=torch.uint8)
        codes[:127, :8], scale[:127, :1] = some.codes, some.block_scale.view(torch.uint8)
        # So that gate * up of float16 is finite.
        return NVFP4Weight(
            codes=codes, block_scale=scale.view(torch.float8_e4m3fn), global_scale=torch.tensor(1 / 64)
        )
    bits = (torch.arange(k) - torch.arange(n).reshape(-1, 1)) % 256
    bits[(bits == 0x7F) | (bits == 0xFF)] = 0
    return coded(kind, bits.to(torch.uint8).view(torch.float8_e4m3fn).float())


def places(n: int, k: int, value: float) -> Tensor:
    """[N, K]: that value where row and column are equal."""
    return torch.eye(n, k) * value


def mixture(kind: str, gate: Weight, up: Weight, down: Weight, dtype: torch.dtype) -> GroupedExperts:
    """The second of two experts; the first gives what nobody asks for."""
    weights = [weight.to("cuda") for weight in (up, gate, down, gate, up, down)]
    return GroupedExperts(pack_experts(weights, 2), dtype)


@pytest.mark.fault("B09")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["nvfp4", *KINDS])
def test_every_code_of_experts(kind: str, dtype: torch.dtype) -> None:
    hidden, width = 256, 128
    ones = coded(kind, torch.full((width, hidden), 32.0))  # silu(32) is 32 but for the last bit of a float32
    every, through = every_value(kind, width, hidden), coded(kind, places(hidden, width, 1.0))
    spread = coded(kind, places(width, hidden, 2.0**-5))
    last = every_value(kind, hidden, width)
    cases = (
        # x picks a column of up; down hands it on.
        (
            mixture(kind, ones, every, through, dtype),
            torch.nn.functional.pad(32 * every.dequantize().T, (0, width)),
        ),
        # gate * up is 1 in one place; that picks a column of down.
        (
            mixture(kind, ones, spread, last, dtype),
            torch.nn.functional.pad(last.dequantize().T, (0, 0, 0, width)),
        ),
    )
    for call, wanted in cases:

        def chosen(x: Tensor, call: GroupedExperts = call) -> Tensor:
            router = torch.ones(len(x), 1, device="cuda")
            return call(x, torch.ones(len(x), 1, dtype=torch.int32, device="cuda"), router, None, None, None)

        for rows in (1, 32, 256):
            check_columns(chosen, wanted.cuda(), dtype, rows)
