"""The quantizer of NVFP4 activations, run on the CPU: codes and scales bit for bit the reference's, in every layout."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors_formats import e4m3
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.nvfp4.quantize_activations import (
    FRAGMENT_BYTES,
    FUNCTION,
    OUTPUTS,
    SOURCE,
    SOURCES,
    padded,
    stored_global,
)
from vtensors_kernels.reference.nvfp4_activations import fragments, tiled_scales, widened
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

pytestmark = needs_compiler
HALVES = [torch.bfloat16, torch.float16]
# Software conversions of both formats; E4M3 by hardware; both by hardware.
ARCHITECTURES = [(800, {}), (900, {}), (1210, {"__CUDA_ARCH_SPECIFIC__": 1210})]
CONVENTIONS = ["multiplier", "divisor"]
_PADDING = {"codes": (1, 1), "tiled": (128, 4), "fragments": (8, 8), "widened": (1, 1)}


def activation_of(convention: str, scale: float) -> FP4Activation:
    """scale: the multiplier, or the reciprocal of the divisor."""
    if convention == "divisor":
        return FP4Activation(global_divisor=1 / torch.tensor(scale))
    return FP4Activation(global_scale=torch.tensor(scale))


def quantized(
    x: Tensor,
    activation: FP4Activation,
    *,
    source: str = "plain",
    output: str = "codes",
    gain: Tensor | None = None,
    eps: float = 0.0,
    architecture: int = 1,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """What the kernel writes for x; memory that it leaves alone stays 0xEE."""
    m, k = x.shape[0], x.shape[1] // (2 if source == "swiglu" else 1)
    rows, groups = padded(m, _PADDING[output][0]), padded(k // 16, _PADDING[output][1])
    if output == "fragments":
        out = torch.full((rows // 8, groups // 8, FRAGMENT_BYTES), 0xEE, dtype=torch.uint8)
    elif output == "widened":
        out = torch.full((m, k), float("nan"), dtype=x.dtype)
    else:
        out = torch.full((m, k // 2), 0xEE, dtype=torch.uint8)
    scales = torch.full((rows, groups), 0xEE, dtype=torch.uint8)
    arch, extra = ARCHITECTURES[architecture]
    defines = {
        "VT_F16": int(x.dtype == torch.float16),
        "VT_SOURCE": SOURCES[source],
        "VT_OUTPUT": OUTPUTS[output],
        **extra,
    }
    norm = source == "norm"
    grid, threads = (rows, 256) if norm else (rows * -(-groups // 64), 64)
    divides = int(activation.global_scale is None)
    arguments = [x, gain, stored_global(activation), out, scales, x.stride(0), m, k, groups, divides, eps]
    emulate(SOURCE, FUNCTION, defines, (grid,), (threads,), arguments, arch=arch, seed=seed)
    return out, scales


def edges(dtype: torch.dtype) -> Tensor:
    """[16, 128]: sizes over many binades, ties of E2M1, zeros of either sign, infinities, subnormals."""
    source = torch.Generator().manual_seed(7)
    x = torch.randn(16, 128, generator=source) * torch.logspace(-5, 4, 16).reshape(16, 1)
    x[0, :16] = 0.0
    x[1, 16:32] = -0.0
    # With the scale 1 of a group whose largest is 6: every tie between codes, and neighbours in 16 bits.
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x[2, :16] = torch.cat([ties, -ties])
    x[3, :16] = torch.cat([ties, -ties]) * (1 + 2**-8)
    x[4, :16] = torch.cat([ties, -ties]) * (1 - 2**-8)
    x[5, 3], x[5, 20] = float("inf"), -float("inf")
    x[6, :32] = 2.0**-14
    x[7, :16] = torch.linspace(-1, 1, 16) * 2**-20
    return x.to(dtype)


@pytest.mark.parametrize("architecture", range(len(ARCHITECTURES)))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_codes_and_scales_are_the_references(convention: str, dtype: torch.dtype, architecture: int) -> None:
    x = edges(dtype)
    for scale in (1 / 448, 1.0, 0.0123, 3e-5, 700.0):
        activation = activation_of(convention, scale)
        codes, scales = quantized(x, activation, architecture=architecture)
        wanted = activation.codes(x)
        assert torch.equal(scales, e4m3.as_bytes(wanted.scale)), scale
        assert torch.equal(codes, wanted.codes), scale


@pytest.mark.parametrize("architecture", range(len(ARCHITECTURES)))
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_block_scale_and_every_code_comes_out_as_the_references(
    convention: str, architecture: int
) -> None:
    # Row s: a group whose largest element asks for scale byte s, and below it every code of either sign.
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().reshape(127, 1)
    grid = torch.tensor([6.0, 0, 0.5, 1, 1.5, 2, 3, 4, -6, -0.0, -0.5, -1, -1.5, -2, -3, -4])
    x = (scale * grid).to(torch.float16)
    activation = activation_of(convention, 1.0)
    codes, scales = quantized(x, activation, architecture=architecture)
    wanted = activation.codes(x)
    assert torch.equal(scales, e4m3.as_bytes(wanted.scale))
    assert torch.equal(codes, wanted.codes)
    assert set(scales.flatten().tolist()) == set(range(127))


@pytest.mark.parametrize("architecture", range(len(ARCHITECTURES)))
def test_scales_between_two_bytes_round_to_the_even_one(architecture: int) -> None:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (values[1:] + values[:-1]) / 2
    x = torch.zeros(126, 16, dtype=torch.float32)
    x[:, 0] = between * 6
    halves = x.to(torch.float16)
    activation = activation_of("multiplier", 1.0)
    _, scales = quantized(halves, activation, architecture=architecture)
    assert torch.equal(scales, e4m3.as_bytes(activation.codes(halves).scale))
    exact = halves[:, 0].float() == x[:, 0]
    assert int(exact.sum()) > 100
    assert bool((scales[exact] % 2 == 0).all())


def close_calls(convention: str) -> list[tuple[float, Tensor]]:
    """(largest of a group, stored global scale) of which another order of the same operations gives another scale."""
    source = torch.Generator().manual_seed(11)
    amax = (torch.rand(4000, generator=source) * 7 + 1).bfloat16().float()
    bytes_ = torch.randint(8, 126, (4000,), generator=source, dtype=torch.uint8)
    values = torch.stack([bytes_, bytes_ + 1]).view(torch.float8_e4m3fn).float().mean(0)
    six = torch.tensor(6.0)
    if convention == "divisor":
        stored = values / (amax / six)
        ours, other = stored * (amax / six), stored * amax / six
    else:
        stored = amax / (six * values)
        ours, other = amax / (six * stored), amax / six / stored
    differ = (e4m3.as_bytes(e4m3.encode(ours)) != e4m3.as_bytes(e4m3.encode(other))).nonzero()[:, 0]
    return [(float(amax[i]), stored[i]) for i in differ[:12]]


@pytest.mark.parametrize("architecture", range(len(ARCHITECTURES)))
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_conventions_own_order_of_operations_decides_a_close_call(
    convention: str, architecture: int
) -> None:
    cases = close_calls(convention)
    assert len(cases) == 12
    for amax, stored in cases:
        x = torch.full((1, 16), amax).bfloat16()
        divides = convention == "divisor"
        activation = FP4Activation(global_divisor=stored) if divides else FP4Activation(global_scale=stored)
        codes, scales = quantized(x, activation, architecture=architecture)
        wanted = activation.codes(x)
        assert torch.equal(scales, e4m3.as_bytes(wanted.scale)), (amax, stored)
        assert torch.equal(codes, wanted.codes), (amax, stored)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_group_of_zeros_or_too_small_for_a_scale_has_zero_codes_and_scale(convention: str) -> None:
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    x[1, 5] = -(2.0**-20)
    codes, scales = quantized(x, activation_of(convention, 1.0))
    assert not codes.any()
    assert not scales.any()


@pytest.mark.parametrize("output", ["codes", "widened"])
def test_a_nan_makes_its_own_group_nan_and_no_other(output: str) -> None:
    x = torch.ones(2, 48, dtype=torch.bfloat16)
    x[0, 20] = float("nan")
    out, scales = quantized(x, activation_of("multiplier", 0.01), output=output)
    if output == "codes":
        assert (scales == 0x7F).tolist() == [[False, True, False], [False, False, False]]
    else:
        assert out.isnan().unflatten(-1, (3, 16)).any(-1).tolist() == [[False, True, False], [False] * 3]
        assert out[0, 16:32].isnan().all()


@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 80), (9, 272), (130, 64)])
@pytest.mark.parametrize("output", ["tiled", "fragments", "widened"])
def test_each_layout_holds_the_references_codes_and_scales_and_zeros_for_padding(
    output: str, m: int, k: int
) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).bfloat16()
    activation = activation_of("multiplier", 0.003)
    wanted = activation.codes(x)
    out, scales = quantized(x, activation, output=output, architecture=2)
    if output == "tiled":
        assert torch.equal(out, wanted.codes)
        assert torch.equal(scales, e4m3.as_bytes(tiled_scales(wanted.scale)))
    elif output == "fragments":
        assert torch.equal(out, fragments(wanted.codes, wanted.scale))
    else:
        assert torch.equal(out, widened(wanted.codes, wanted.scale, x.dtype))


def test_a_widened_activation_times_its_global_scale_is_the_dequantized_one() -> None:
    x = edges(torch.float16)
    activation = activation_of("multiplier", 0.0123)
    out, _ = quantized(x, activation, output="widened")
    assert torch.equal(out.float() * 0.0123, activation(x.float()))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 5136)])
def test_a_pre_scale_multiplies_and_rounds_before_the_quantizer(m: int, k: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(m)
    x, gain = torch.randn(m, k, generator=source).to(dtype), torch.rand(k, generator=source) + 0.5
    activation = activation_of("divisor", 0.002)
    codes, _ = quantized(x, activation, source="pre_scale", gain=gain)
    assert torch.equal(codes, activation.codes((x.float() * gain).to(dtype)).codes)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 4112), (2, 8192)])
def test_a_norm_before_the_quantizer_is_the_references(m: int, k: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(k)
    # Squares of these sum exactly in any order.
    x = (torch.randint(-8, 9, (m, k), generator=source) / 4).to(dtype)
    gain = torch.rand(k, generator=source) + 0.5
    activation = activation_of("multiplier", 0.002)
    codes, _ = quantized(x, activation, source="norm", gain=gain, eps=1e-6, seed=m)
    wanted = activation.codes(rms_norm(x, gain, 1e-6, zero_centered=False))
    # The reciprocal root may be one float32 step off, which rarely shows in 16 bits.
    assert float((codes != wanted.codes).float().mean()) < 1e-3


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gate_before_the_quantizer_is_the_references(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(5, 2 * 144, generator=source).to(dtype)
    activation = activation_of("multiplier", 0.002)
    codes, _ = quantized(x, activation, source="swiglu")
    wanted = activation.codes(swiglu(x[:, :144], x[:, 144:]))
    assert float((codes != wanted.codes).float().mean()) < 1e-3


@pytest.mark.parametrize("source", ["plain", "norm"])
def test_rows_of_a_wider_matrix_are_read_where_they_lie(source: str) -> None:
    wide = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    x, gain = wide[:, 32:80], torch.ones(48) if source == "norm" else None
    activation = activation_of("multiplier", 0.002)
    strided, _ = quantized(x, activation, source=source, gain=gain)
    alone, _ = quantized(x.contiguous(), activation, source=source, gain=gain)
    assert torch.equal(strided, alone)


@pytest.mark.parametrize(("source", "output"), list(product(["plain", "norm"], ["codes", "widened"])))
def test_a_row_is_the_same_whatever_lies_beside_it(source: str, output: str) -> None:
    x = torch.randn(9, 320, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[4] = float("nan")
    gain = torch.rand(320) if source == "norm" else None
    activation = activation_of("divisor", 0.01)
    together, _ = quantized(x, activation, source=source, output=output, gain=gain, eps=1e-6)
    for row in (0, 8):
        alone, _ = quantized(x[row : row + 1], activation, source=source, output=output, gain=gain, eps=1e-6)
        assert torch.equal(together[row], alone[0])
