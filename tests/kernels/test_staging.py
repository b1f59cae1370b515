"""x as warpgroup products read it, in the emulator: each column in its place, one launch with the bits of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_launches import EmulatedFunction, EmulatedLaunch
from emulation.emulator import at_the_end_of_memory, emulate, needs_compiler
from vtensors.errors import VtensorsError
from vtensors_kernels.nvfp4 import staging
from vtensors_kernels.nvfp4.staging import Norm, Staging
from vtensors_kernels.packed_tiles import column_steps
from vtensors_kernels.steps.rms_norm import NormForm

HALVES = [torch.bfloat16, torch.float16]
EPS = 1e-6

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(
        source: str, name: str, _index: int, defines: dict[str, int], _shared: int = 0
    ) -> EmulatedFunction:
        return EmulatedFunction(source=source, name=name, defines=tuple(sorted(defines.items())))

    monkeypatch.setattr(staging, "Launch", EmulatedLaunch)
    monkeypatch.setattr(staging, "compiled_function", compiled)


def _x(m: int, k: int, pitch: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie `pitch` elements apart, NaN between them; what follows the last is no memory of the process."""
    whole = at_the_end_of_memory(((m - 1) * pitch + k) * dtype.itemsize).view(dtype)
    x = whole.as_strided((m, k), (pitch, 1))
    x.copy_(torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)))
    return x


def _staged(made: Staging, x: Tensor, norm: Norm | None = None) -> Tensor:
    """[steps, 16, tokens, 8] from a buffer of NaN."""
    buffer = at_the_end_of_memory(made.nbytes)
    made.call(0, x, norm, buffer.data_ptr())
    return buffer.view(x.dtype).view(-1, 16, made.tokens, 8)


def _laid_out(x: Tensor, tokens: int) -> Tensor:
    """[steps, 16, tokens, 8] of x [M, K]; NaN where no token is."""
    m, k = x.shape
    padded = torch.full((tokens, column_steps(k) * 128), float("nan"), dtype=x.dtype)
    padded[:m] = 0
    padded[:m, :k] = x
    staged = torch.full((column_steps(k), 16, tokens, 8), float("nan"), dtype=x.dtype)
    for step in range(column_steps(k)):
        for u in range(4):
            for pair in range(4):
                for c in range(4):
                    column = 128 * step + 32 * c + 8 * (u ^ (c >> 1)) + 2 * pair
                    staged[step, 4 * u + pair, :, 2 * c : 2 * c + 2] = padded[:, column : column + 2]
    return staged


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, any NaN like any other."""
    return torch.equal(a.nan_to_num(777.0).view(torch.int16), b.nan_to_num(777.0).view(torch.int16))


# tokens of a product, M, K, elements between rows: one and many steps a block, tails, rows apart.
SHAPES = [
    (24, 17, 16, 16),
    (32, 32, 272, 304),
    (24, 23, 5136, 5136),
    (48, 41, 1168, 1168),
    (64, 64, 2320, 2328),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tokens", "m", "k", "pitch"), SHAPES)
def test_every_column_of_every_token_lies_where_a_product_reads_it(
    tokens: int, m: int, k: int, pitch: int, dtype: torch.dtype
) -> None:
    x = _x(m, k, pitch, dtype)
    made: Any = Staging.of(k, tokens, None, dtype, 0)
    assert _same(_staged(made, x), _laid_out(x, tokens))


def test_a_block_that_takes_many_steps_lays_out_all_of_them() -> None:
    x = _x(9, 2064, 2064, torch.bfloat16)
    made = Staging.of(2064, 16, None, torch.bfloat16, 0)
    made.permute.grid = (3, 4, 1)
    assert _same(_staged(made, x), _laid_out(x, 16))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_pre_scale_multiplies_before_one_rounding(dtype: torch.dtype) -> None:
    x, scale = _x(19, 656, 664, dtype), torch.rand(656, generator=torch.Generator().manual_seed(0)) * 3
    made = Staging.of(656, 24, scale, dtype, 0)
    assert _same(_staged(made, x), _laid_out((x.float() * scale).to(dtype), 24))


def _normed(x: Tensor, gain: Tensor) -> Tensor:
    """By the kernel that norms rows."""
    form, out = NormForm.of(x.shape[1]), torch.full_like(x, float("nan"))
    defines = {"VT_F16": int(x.dtype == torch.float16), "VT_CHUNKS": form.chunks}
    emulate(
        "common/rms_norm.cu",
        "rms_norm",
        defines,
        (x.shape[0],),
        (form.threads,),
        [x, gain, out, x.stride(0), x.shape[1], EPS],
        shared_bytes=form.shared_bytes,
    )
    return out


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "m", "k"),
    [(8, 3, 16), (24, 17, 272), (8, 2, 2064), (32, 20, 5120), (8, 2, 8208), (8, 1, 16384)],
)
def test_a_norm_in_front_gives_the_bits_of_two_launches(
    tokens: int, m: int, k: int, dtype: torch.dtype, scaled: bool
) -> None:
    x, source = _x(m, k, k, dtype), torch.Generator().manual_seed(k)
    x[-1] *= 50
    scale = torch.rand(k, generator=source) * 3 if scaled else None
    gain = torch.rand(k, generator=source) * 2 - 0.5
    made = Staging.of(k, tokens, scale, dtype, 0)
    ours = _staged(made, x, Norm(gain=gain, eps=EPS))
    assert not ours[:, :, :m].isnan().any()
    assert _same(ours, _staged(made, _normed(x, gain)))


def test_rows_that_no_norm_kernel_takes_are_normed_before() -> None:
    made = Staging.of(17408, 32, None, torch.bfloat16, 0)
    assert made.norm is None
    assert not made.norms(torch.zeros(1, 17408).bfloat16(), Norm(gain=torch.ones(17408), eps=EPS))


def test_more_than_32_tokens_are_normed_before() -> None:
    assert [Staging.of(64, tokens, None, torch.bfloat16, 0).norm is None for tokens in (24, 32, 48, 64)] == [
        False,
        False,
        True,
        True,
    ]


def test_what_lies_otherwise_than_the_kernel_reads_is_normed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_why_not", lambda columns, dtype, device: None)
    made = Staging.of(64, 8, None, torch.bfloat16, 0)
    x, gain = torch.zeros(3, 128).bfloat16(), torch.ones(68)
    assert made.norms(x[:, :64].contiguous(), Norm(gain=gain[:64], eps=EPS))
    assert not made.norms(x[:, :64], Norm(gain=gain[:64], eps=EPS))
    assert not made.norms(x[:, :64].contiguous(), Norm(gain=gain[1:65], eps=EPS))
    assert not made.norms(x[:, :64].contiguous(), Norm(gain=gain[:64].bfloat16(), eps=EPS))
    monkeypatch.setattr(staging, "_why_not", lambda columns, dtype, device: "it failed its self-test")
    assert not made.norms(x[:, :64].contiguous(), Norm(gain=gain[:64], eps=EPS))


def test_a_failed_self_test_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise VtensorsError("the self-test failed", seen="other bits")

    monkeypatch.setattr(staging, "probe_staging", fail)
    # Of a length that no other test asks for: verdicts are kept.
    assert staging._why_not(8 * 1021, torch.bfloat16, torch.device("cpu")) == "the self-test failed"
    assert "norms of 8168 columns are launched before" in caplog.text
