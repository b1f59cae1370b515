"""The norm kernel in the emulator: the reference's values, the fused norm's bits, rows that do not see each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4.stream_form import choose_form
from vtensors_kernels.reference.nvfp4_packing import pack_reference
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.steps.rms_norm import INSTANTIATIONS, TOLERANCES, NormForm, RMSNormKernel

HALVES = [torch.bfloat16, torch.float16]
EPS = 1e-6


def normed(x: Tensor, gain: Tensor, *, eps: float = EPS, seed: int = 0) -> Tensor:
    """x [rows, D], rows any distance apart -> [rows, D]."""
    form = NormForm.of(x.shape[1])
    out = torch.full(tuple(x.shape), float("nan"), dtype=x.dtype)
    defines = {"VT_F16": int(x.dtype == torch.float16), "VT_CHUNKS": form.chunks}
    arguments = [x, gain, out, x.stride(0), x.shape[1], eps]
    emulate(
        "common/rms_norm.cu",
        "rms_norm",
        defines,
        (x.shape[0],),
        (form.threads,),
        arguments,
        shared_bytes=form.shared_bytes,
        seed=seed,
    )
    return out


def inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(columns)
    return torch.randn(rows, columns, generator=source).to(dtype), torch.rand(
        columns, generator=source
    ) * 2 - 0.5


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [8, 64, 256, 264, 2048, 2056, 5120, 8192, 8200, 16384])
def test_any_length_of_row_is_normed_as_the_reference_does(columns: int, dtype: torch.dtype) -> None:
    x, gain = inputs(3, columns, dtype)
    x[1] *= 100
    ours, wanted = normed(x, gain), rms_norm(x.float(), gain, EPS, zero_centered=False)
    assert not ours.isnan().any()
    assert ((ours.float() - wanted).abs() <= TOLERANCES[dtype] * (wanted.abs() + 2.0**-14)).all()


@needs_compiler
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_changes_nothing(seed: int) -> None:
    x, gain = inputs(2, 5120, torch.bfloat16)
    assert torch.equal(normed(x, gain, seed=seed), normed(x, gain))


@needs_compiler
def test_a_row_is_the_same_bits_alone_and_as_a_slice_of_a_wider_matrix() -> None:
    x, gain = inputs(4, 1032, torch.bfloat16)
    wide = torch.full((4, 2048), float("nan"), dtype=x.dtype)
    wide[:, 16:1048] = x
    whole = normed(x, gain)
    assert torch.equal(normed(wide[:, 16:1048], gain), whole)
    assert torch.equal(torch.cat([normed(row, gain) for row in x.split(1)]), whole)


@needs_compiler
def test_eps_and_zeros_count() -> None:
    x, gain = inputs(2, 64, torch.bfloat16)
    x[0] = 0
    ours = normed(x, gain, eps=0.5)
    assert ours[0].eq(0).all()
    assert torch.allclose(
        ours.float(), rms_norm(x.float(), gain, 0.5, zero_centered=False), rtol=2**-8, atol=1e-6
    )
    assert not torch.equal(ours[1], normed(x, gain)[1])


@needs_compiler
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [272, 1024])
def test_the_bits_are_those_of_the_norm_fused_into_a_linear(columns: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    weight = NVFP4Weight(
        codes=torch.randint(0, 256, (32, columns // 2), generator=source, dtype=torch.uint8),
        block_scale=torch.full((32, columns // 16), 56, dtype=torch.uint8).view(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 64),
    )
    packed, (x, gain) = pack_reference([weight]), inputs(3, columns, dtype)
    form = choose_form(32, columns, 3, 1, "sm_120a")

    def linear(x: Tensor, prologue: int) -> Tensor:
        out = torch.full((3, 32), float("nan"), dtype=dtype)
        tensors = [packed.blocks, x, out, packed.row_scale, None, None, gain, None]
        emulate(
            "common/linear_nvfp4_stream.cu",
            "linear_nvfp4_stream",
            {**form.defines, "VT_F16": int(dtype == torch.float16), "VT_PROLOGUE": prologue},
            (form.grid,),
            (form.threads,),
            [*tensors, EPS, 3, 32, columns, form.stages, form.stage_blocks, form.slots],
            shared_bytes=form.shared_bytes,
        )
        return out

    assert torch.equal(linear(x, 2), linear(normed(x, gain), 0))


@pytest.mark.parametrize("columns", [0, 4, 12, 16392])
def test_rows_of_other_lengths_are_refused(columns: int) -> None:
    with pytest.raises(RequestError, match="multiple of 8"):
        NormForm.of(columns)


def test_every_length_has_a_compiled_form_with_room_for_it() -> None:
    compiled = {form.defines["VT_CHUNKS"]: form.shared_bytes for form in INSTANTIATIONS}
    for columns in range(8, 16385, 8):
        form = NormForm.of(columns)
        assert form.shared_bytes <= compiled[form.chunks]
        assert form.threads <= 512
        assert columns <= 8 * form.chunks * form.threads


def test_gains_elsewhere_or_of_another_dtype_are_refused() -> None:
    with pytest.raises(RequestError, match="CUDA"):
        RMSNormKernel(torch.ones(64), EPS, torch.bfloat16)
    with pytest.raises(RequestError, match="float32"):
        RMSNormKernel(torch.ones(64, dtype=torch.bfloat16), EPS, torch.bfloat16)
    with pytest.raises(RequestError, match="16 bits"):
        RMSNormKernel(torch.ones(64), EPS, torch.float32)
