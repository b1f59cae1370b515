"""`linear_nvfp4_stream` on a CUDA device: every code, tails, bits at any number of tokens, all variants."""

from __future__ import annotations

import attrs
import pytest
import torch

from nvfp4_cuda_cases import HALVES, every_code_and_scale, make_weight, make_x, poisoned
from nvfp4_stream_cases import EPS, ROWS, check, stream_linear
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

pytestmark = pytest.mark.gpu
TOKENS = [1, 2, 3, 8, 9, 16, 17, 31, 32]
FEW_TOKENS = [1, 2, 7, 16, 29]


@pytest.mark.fault("B09")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
def test_every_code_times_every_scale_is_exact(rows: int, dtype: torch.dtype) -> None:
    weight = every_code_and_scale()
    call, eye = stream_linear(weight, dtype, rows=rows), torch.eye(16, device="cuda", dtype=dtype)
    wanted = weight.dequantize(torch.float32).T
    assert torch.equal(call(eye, out=poisoned(16, 127, dtype=dtype)).float(), wanted)
    alone = [call(eye[i : i + 1], out=poisoned(1, 127, dtype=dtype)) for i in range(16)]
    assert torch.equal(torch.cat(alone).float(), wanted)


@pytest.mark.fault("B69")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 16), (7, 48), (15, 272), (16, 128), (17, 1040), (43, 176), (200, 2048), (334, 5120), (1030, 1024)],
)
@pytest.mark.parametrize("m", TOKENS)
def test_any_shape_and_number_of_tokens(m: int, n: int, k: int, rows: int, dtype: torch.dtype) -> None:
    weight, x = make_weight(n, k), make_x(m, k, dtype)
    ours = stream_linear(weight, dtype, rows=rows)(x, out=poisoned(m, n, dtype=dtype))
    check(ours, linear(x.float(), weight), dtype)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("clusters", [1, 2, 7])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [272, 5120, 17408])
def test_a_row_is_the_same_bits_at_any_number_of_tokens_and_place(k: int, rows: int, clusters: int) -> None:
    weight, x = make_weight(600, k), make_x(32, k, torch.bfloat16)
    call, few = (
        stream_linear(weight, x.dtype, rows=rows),
        stream_linear(weight, x.dtype, rows=rows, clusters=clusters),
    )
    whole = call(x, out=poisoned(32, 600, dtype=x.dtype))
    check(whole, linear(x.float(), weight), x.dtype)
    for m in range(1, 33):
        assert torch.equal(call(x[:m]), whole[:m]), f"M = {m}"
        assert torch.equal(few(x[:m]), whole[:m]), f"M = {m} in {clusters} clusters"
        assert torch.equal(call(x[32 - m :]), whole[32 - m :]), f"the last {m}"
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).cuda()
    assert torch.equal(call(x[order]), whole[order])
    assert torch.equal(call(x[3:4].expand(32, -1)), whole[3:4].expand(32, -1))


@pytest.mark.fault("B31")
def test_a_row_is_the_same_bits_whatever_matrix_it_is_packed_with() -> None:
    parts, x = [make_weight(n, 2048, seed=n) for n in (300, 40, 17)], make_x(5, 2048, torch.bfloat16)
    together = stream_linear(parts, x.dtype)(x)
    assert torch.equal(together, torch.cat([stream_linear(part, x.dtype)(x) for part in parts], dim=-1))


@pytest.mark.fault("B05")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", [40, 77, 333, 1160])
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_bias_scale_per_row_and_residual(m: int, n: int, rows: int, dtype: torch.dtype) -> None:
    weight = attrs.evolve(make_weight(n, 1040, per_row=True), bias=torch.randn(n).cuda())
    x, residual = make_x(m, 1040, dtype), make_x(m, n, dtype, seed=1)
    wanted = linear(x.float(), weight)
    check(stream_linear(weight, dtype, rows=rows)(x, out=poisoned(m, n, dtype=dtype)), wanted, dtype)
    add = stream_linear(weight, dtype, "linear_add", rows=rows)
    check(add(x, residual, out=poisoned(m, n, dtype=dtype)), wanted + residual.float(), dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("f", [8, 24, 33, 43, 512])
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_swiglu_of_paired_rows(m: int, f: int, rows: int, dtype: torch.dtype) -> None:
    gate, up = make_weight(f, 1040, per_row=True), make_weight(f, 1040, seed=1)
    up = attrs.evolve(up, bias=torch.randn(f).cuda())
    x = make_x(m, 1040, dtype)
    ours = stream_linear([gate, up], dtype, "linear_swiglu", rows=rows)(x, out=poisoned(m, f, dtype=dtype))
    check(ours, swiglu(linear(x.float(), gate), linear(x.float(), up)), dtype, roundings=2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [48, 1040, 5120])
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_a_pre_scale_is_what_scaling_x_first_is(m: int, k: int, rows: int, dtype: torch.dtype) -> None:
    from vtensors_kernels.arguments import scaled_x

    weight, x = make_weight(333, k), make_x(m, k, dtype)
    pre_scale = torch.rand(k, generator=torch.Generator().manual_seed(2)).cuda() + 0.5
    scaled = attrs.evolve(weight, pre_scale=pre_scale)
    ours = stream_linear(scaled, dtype, rows=rows)(x, out=poisoned(m, 333, dtype=dtype))
    assert torch.equal(ours, stream_linear(weight, dtype, rows=rows)(scaled_x(x, pre_scale)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [48, 1040, 5120, 17408])
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_a_norm_in_front_is_the_norm_of_its_own(m: int, k: int, rows: int, dtype: torch.dtype) -> None:
    weight, x = (
        make_weight(200, k),
        make_x(m, k, dtype) * torch.linspace(0.01, 30, m).cuda()[:, None].to(dtype),
    )
    gain = torch.rand(k, generator=torch.Generator().manual_seed(3)).cuda() * 2
    call = stream_linear(weight, dtype, rows=rows, norm=True)
    ours = call(x, None, gain, EPS, poisoned(m, 200, dtype=dtype))
    normed = rms_norm(x, gain, EPS, zero_centered=False)
    check(ours, linear(normed.float(), weight), dtype)
    for i in (0, m - 1):
        assert torch.equal(call(x[i : i + 1], None, gain, EPS)[0], ours[i])
    gate, up = make_weight(72, k, seed=4), make_weight(72, k, seed=5)
    both = stream_linear([gate, up], dtype, "linear_swiglu", rows=rows, norm=True)
    wanted = swiglu(linear(normed.float(), gate), linear(normed.float(), up))
    check(both(x, None, gain, EPS, poisoned(m, 72, dtype=dtype)), wanted, dtype, roundings=2)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", [16, 333, 4000])
@pytest.mark.parametrize("m", FEW_TOKENS)
def test_the_largest_is_the_first_of_the_largest_logits(m: int, n: int, rows: int) -> None:
    from vtensors_kernels.nvfp4.repack import pack
    from vtensors_kernels.nvfp4.stream import StreamArgmax

    weight, x = make_weight(n, 1040), make_x(m, 1040, torch.bfloat16)
    weight.codes[n // 2 : n // 2 * 2] = weight.codes[: n // 2].clone()
    weight.block_scale[n // 2 : n // 2 * 2] = weight.block_scale[: n // 2].clone()
    logits = stream_linear(weight, x.dtype, rows=rows)(x)
    columns = torch.arange(n, device="cuda").expand(m, n)
    wanted = torch.where(logits == logits.amax(-1, keepdim=True), columns, n).amin(-1)
    pick = StreamArgmax(pack([weight]), x.dtype, rows=rows)
    assert torch.equal(pick(x, out=torch.full((m,), -1, device="cuda")), wanted)
    assert not pick(torch.zeros_like(x)).any()
    ids = pick(torch.full_like(x, float("nan")))
    assert bool(((ids >= 0) & (ids < n)).all())
