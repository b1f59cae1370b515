"""`linear_fp8_stream` and its packed layout on a CUDA device: every code, scales of every kind, bits at any M."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from torch import Tensor

from fp8_cases import KINDS, every_code, make_fp8
from nvfp4_cuda_cases import HALVES, make_x, poisoned, replayed
from nvfp4_stream_cases import EPS, ROWS, check
from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import MXFP8Weight
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference, unpack_fp8_reference
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

if TYPE_CHECKING:
    from vtensors_kernels.fp8.scales import FP8
    from vtensors_kernels.nvfp4.stream import StreamLinear

pytestmark = pytest.mark.gpu
SHAPES = [
    (1, 32),
    (7, 64),
    (15, 288),
    (16, 128),
    (17, 1056),
    (43, 160),
    (200, 2048),
    (334, 5120),
    (1030, 1024),
]
TOKENS = [1, 2, 8, 9, 16, 17, 32]


def on_device(kind: str, n: int, k: int, *, seed: int = 0) -> FP8:
    return make_fp8(kind, n, k, seed=seed).to("cuda")


def bound(
    weight: FP8 | list[FP8],
    dtype: torch.dtype,
    epilogue: str = "linear",
    *,
    norm: bool = False,
    rows: int | None = None,
    clusters: int | None = None,
) -> StreamLinear:
    from vtensors_kernels.fp8.repack import pack_fp8
    from vtensors_kernels.nvfp4.stream import StreamLinear

    packed = pack_fp8(weight if isinstance(weight, list) else [weight], paired=epilogue == "linear_swiglu")
    return StreamLinear(packed, dtype, epilogue, "norm" if norm else None, rows=rows, clusters=clusters)


def request(
    op: str, scheme: str, shape: tuple[int, int], parts: tuple[int, ...], *traits: str
) -> KernelRequest:
    return KernelRequest(
        op=op,
        scheme=scheme,
        activations="16bit",
        device="cuda:0",
        capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        shape=shape,
        parts=parts,
        tokens=(1, 32),
        traits=frozenset(traits),
    )


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (40, 16)])
def test_the_repack_kernel_writes_the_bytes_of_its_twin(n: int, k: int, kind: str, paired: bool) -> None:
    from vtensors_kernels.fp8.repack import pack_fp8

    if kind == "mx" and k % 32:
        pytest.skip("MXFP8 has whole groups of 32 columns")
    n = -(-n // 4) * 4 if kind == "block" else n
    parts = [on_device(kind, n, k, seed=i) for i in range(2)]
    parts[1] = attrs.evolve(parts[1], bias=torch.randn(n).cuda())
    if not paired:
        parts.append(on_device(kind, n + 3, k, seed=2))
    packed = pack_fp8(parts, paired=paired)
    wanted = pack_fp8_reference([part.to("cpu") for part in parts], paired=paired)
    assert torch.equal(packed.blocks.cpu(), wanted.blocks)
    assert torch.equal(packed.row_scale.cpu(), wanted.row_scale)
    assert packed.bias is not None
    assert wanted.bias is not None
    assert torch.equal(packed.bias.cpu(), wanted.bias)
    whole = torch.cat([part.to("cpu").dequantize() for part in parts])
    assert torch.equal(unpack_fp8_reference(packed).cpu(), whole)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_finite_code_is_exact(kind: str, rows: int, dtype: torch.dtype) -> None:
    weight = every_code(kind).to("cuda")
    call, eye = bound(weight, dtype, rows=rows), torch.eye(256, device="cuda", dtype=dtype)
    wanted = weight.dequantize(torch.float32).T
    for first in range(0, 256, 32):
        some = call(eye[first : first + 32], out=poisoned(32, 16, dtype=dtype))
        assert torch.equal(some.float(), wanted[first : first + 32])
    alone = [call(eye[i : i + 1], out=poisoned(1, 16, dtype=dtype)) for i in range(0, 256, 5)]
    assert torch.equal(torch.cat(alone).float(), wanted[::5])


@pytest.mark.fault("B15")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("below", [0, 1, 7, 15, 22])
def test_groups_far_below_a_rows_largest_scale_are_exact(below: int, dtype: torch.dtype) -> None:
    weight = every_code("mx")
    assert isinstance(weight, MXFP8Weight)
    weight.scale[:, 1::2] -= below
    weight.scale[5:] += 3
    weight = weight.to("cuda")
    x = torch.eye(256, device="cuda", dtype=dtype)
    ours = torch.cat([bound(weight, dtype)(x[i : i + 32]) for i in range(0, 256, 32)])
    wanted = weight.dequantize(torch.float32).T.to(dtype)
    assert torch.equal(ours, wanted)


@pytest.mark.fault("B14")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_any_shape_and_number_of_tokens(n: int, k: int, kind: str, rows: int, dtype: torch.dtype) -> None:
    weight = on_device(kind, n, k)
    call = bound(weight, dtype, rows=rows)
    for m in TOKENS:
        x = make_x(m, k, dtype)
        check(call(x, out=poisoned(m, n, dtype=dtype)), linear(x.float(), weight), dtype)


@pytest.mark.parametrize("clusters", [1, 7])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [288, 5120, 17408])
def test_a_row_is_the_same_bits_at_any_number_of_tokens(k: int, kind: str, rows: int, clusters: int) -> None:
    weight, x = on_device(kind, 600, k), make_x(32, k, torch.bfloat16)
    call, few = bound(weight, x.dtype, rows=rows), bound(weight, x.dtype, rows=rows, clusters=clusters)
    whole = call(x, out=poisoned(32, 600, dtype=x.dtype))
    check(whole, linear(x.float(), weight), x.dtype)
    for m in range(1, 33):
        assert torch.equal(call(x[:m]), whole[:m]), f"M = {m}"
        assert torch.equal(few(x[:m]), whole[:m]), f"M = {m} in {clusters} clusters"
        assert torch.equal(call(x[32 - m :]), whole[32 - m :]), f"the last {m}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [33, 47, 64])
def test_more_than_32_tokens_take_two_launches_and_the_same_bits(m: int, kind: str) -> None:
    weight, x = on_device(kind, 600, 5120), make_x(m, 5120, torch.bfloat16)
    call = bound(weight, x.dtype)
    whole = call(x, out=poisoned(m, 600, dtype=x.dtype))
    assert torch.equal(whole, torch.cat([call(x[:32]), call(x[32:])]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [40, 333])
@pytest.mark.parametrize("m", [1, 7, 16, 29])
def test_all_variants(m: int, n: int, kind: str, dtype: torch.dtype) -> None:
    from vtensors_kernels.arguments import scaled_x

    weight = attrs.evolve(on_device(kind, n, 1056), bias=torch.randn(n).cuda())
    up = on_device(kind, n, 1056, seed=1)
    x, residual = make_x(m, 1056, dtype), make_x(m, n, dtype, seed=1)
    gain = torch.rand(1056, generator=torch.Generator().manual_seed(3)).cuda() * 2
    wanted, beside = linear(x.float(), weight), linear(x.float(), up)
    ours = bound(weight, dtype, "linear_add")(x, residual, out=poisoned(m, n, dtype=dtype))
    check(ours, wanted + residual.float(), dtype)
    ours = bound([weight, up], dtype, "linear_swiglu")(x, out=poisoned(m, n, dtype=dtype))
    check(ours, swiglu(wanted, beside), dtype, roundings=2)
    normed = rms_norm(x, gain, EPS, zero_centered=False)
    ours = bound(weight, dtype, norm=True)(x, None, gain, EPS, poisoned(m, n, dtype=dtype))
    check(ours, linear(normed.float(), weight), dtype)
    scaled = attrs.evolve(weight, pre_scale=gain)
    assert torch.equal(bound(scaled, dtype)(x), bound(weight, dtype)(scaled_x(x, gain)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_whatever_matrix_it_is_packed_with(kind: str) -> None:
    parts, x = [on_device(kind, n, 2048, seed=n) for n in (300, 40, 17)], make_x(5, 2048, torch.bfloat16)
    together = bound(parts, x.dtype)(x)
    assert torch.equal(together, torch.cat([bound(part, x.dtype)(x) for part in parts], dim=-1))


@pytest.mark.parametrize("m", [1, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_replays_agree(kind: str, m: int) -> None:
    weight, x = on_device(kind, 5120, 2048), make_x(m, 2048, torch.bfloat16)
    call = bound(weight, x.dtype)
    calls: list[Callable[[], Tensor]] = [lambda: call(x)]
    first, last = replayed(calls[0])
    assert torch.equal(first, last)
    assert torch.equal(first, call(x))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_finite_code_is_widened_exactly(kind: str, dtype: torch.dtype) -> None:
    from vtensors_kernels.fp8.repack import pack_fp8
    from vtensors_kernels.nvfp4.packed_widening import PackedWidener

    weight = every_code(kind).to("cuda")
    packed, out = pack_fp8([weight]), poisoned(16, 256, dtype=dtype)
    PackedWidener(packed, dtype, 0, 16)(out)
    assert torch.equal(out.float() * packed.row_scale[:, None], weight.dequantize())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(7, 64), (40, 160), (1030, 1024)])
@pytest.mark.parametrize("m", [1, 65])
def test_packed_widening_agrees_with_the_reference(
    m: int, n: int, k: int, kind: str, dtype: torch.dtype
) -> None:
    from vtensors_kernels.fp8.repack import pack_fp8
    from vtensors_kernels.nvfp4 import packed_widening

    weight, x = on_device(kind, n, k), make_x(m, k, dtype)
    residual, wanted = make_x(m, n, dtype, seed=1), linear(x.float(), weight)
    # Weights of block-scaled rows are rounded too.
    roundings = 2 if kind == "block" else 1
    ours = packed_widening.bind_linear(pack_fp8([weight]), dtype)(x, out=poisoned(m, n, dtype=dtype))
    check(ours, wanted, dtype, roundings=roundings)
    ours = packed_widening.bind_linear_add(pack_fp8([weight]), dtype)(x, residual)
    check(ours, wanted + residual.float(), dtype, roundings=roundings)
    up = on_device(kind, n, k, seed=1)
    ours = packed_widening.bind_linear_swiglu(pack_fp8([weight, up], paired=True), dtype)(x)
    check(ours, swiglu(wanted, linear(x.float(), up)), dtype, roundings=2 + roundings)


@pytest.mark.parametrize(
    ("op", "shape", "parts", "traits"),
    [
        ("linear", (5120, 6144), (5120,), ("bias",)),
        ("norm_linears", (14336, 5120), (12288, 1024, 1024), ()),
        ("linear_add", (5120, 17408), (5120,), ("pre_scale",)),
        ("norm_linear_swiglu", (34816, 5120), (17408, 17408), ()),
        ("linear_argmax", (248320, 5120), (248320,), ()),
        ("linear", (66, 128), (66,), ()),
    ],
)
@pytest.mark.parametrize("scheme", ["fp8-tensor", "fp8-row", "fp8-block", "mxfp8"])
def test_the_self_tests_pass(
    scheme: str, op: str, shape: tuple[int, int], parts: tuple[int, ...], traits: tuple[str, ...]
) -> None:
    from vtensors_plugins.backends.cuda_fp8 import fp8_kernels

    asked = request(op, scheme, shape, parts, *traits)
    for kernel in fp8_kernels():
        if kernel.op == op and scheme in kernel.schemes:
            assert kernel.refuse(asked) is None
            assert kernel.probe is not None
            assert kernel.fingerprint is not None
            kernel.probe(asked)
            assert kernel.fingerprint(asked) == kernel.fingerprint(asked)


def test_a_wrong_result_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensors_kernels.fp8 import scales
    from vtensors_kernels.fp8.stream import probe_fp8_stream

    real = scales.row_scale
    asked = request("linear", "fp8-row", (640, 1024), (640,))
    probe_fp8_stream(asked)
    monkeypatch.setattr("vtensors_kernels.fp8.repack.row_scale", lambda weight: real(weight).roll(1))
    with pytest.raises(VtensorsError):
        probe_fp8_stream(asked)
