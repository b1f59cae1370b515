"""`linear_plain_small` emulated on the CPU: its sums against the reference, tails, forms, and a row's bits at any M."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_formats import PlainWeight
from vtensors_kernels.plain.matrix import PlainMatrix, stack_rows
from vtensors_kernels.plain.probe import EPS, random_matrix, random_rows, wanted
from vtensors_kernels.plain.small import FUNCTION, INSTANTIATIONS, SOURCE
from vtensors_kernels.plain.small_form import MAX_TOKENS, SmallForm, choose_small_form, small_forms

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
FORMS = pytest.mark.parametrize("form", small_forms(False), ids=str)
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


def run(
    matrix: PlainMatrix,
    x: Tensor,
    form: SmallForm,
    *,
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    arch: int = 900,
    seed: int = 0,
) -> Tensor:
    """y of the emulated kernel, its output NaN before; x and residual may have rows apart."""
    (n, k), m = matrix.shape, x.shape[0]
    out = torch.full((m, n), float("nan"), dtype=x.dtype)
    defines = {**form.defines, "VT_F16": int(x.dtype == torch.float16), "VT_NORM": int(gain is not None)}
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    tensors = [matrix.rows, x, out, matrix.bias, residual, gain]
    emulate(
        SOURCE,
        FUNCTION,
        defines,
        form.grid(n, m),
        (32 * form.warps,),
        [*tensors, EPS, m, n, k, *strides],
        arch=arch,
        seed=seed,
    )
    return out


def close(y: Tensor, reference: Tensor, accepted: float) -> bool:
    return bool(((y.double() - reference).norm(dim=-1) / reference.norm(dim=-1) < accepted).all())


@needs_compiler
@HALVES
@FORMS
@pytest.mark.parametrize("shape", [(1, 8), (43, 40), (40, 648), (33, 1040)], ids=str)
def test_products_are_the_references(form: SmallForm, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    matrix = random_matrix(*shape, dtype, "cpu", bias=True)
    for m in (1, 5, 17):
        x = random_rows(m, shape[1], dtype, "cpu")
        residual = random_rows(m, shape[0], dtype, "cpu", seed=2)
        y = run(matrix, x, form, residual=residual, seed=m % 3)
        assert close(y, wanted(matrix, x, residual), TOLERANCE[dtype])


@needs_compiler
@FORMS
def test_the_norm_in_front_is_the_references(form: SmallForm) -> None:
    matrix, x = random_matrix(19, 328, torch.bfloat16, "cpu"), random_rows(18, 328, torch.bfloat16, "cpu")
    gain = torch.linspace(0.5, 1.5, 328)
    assert close(run(matrix, x, form, gain=gain), wanted(matrix, x, gain=gain), 8e-3)


@needs_compiler
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("rows", [1, 4], ids=["tiles of 8", "tiles of 32"])
def test_a_row_has_the_same_bits_at_any_number_of_tokens(rows: int, normed: bool) -> None:
    k = 712
    matrix, x = random_matrix(21, k, torch.bfloat16, "cpu"), random_rows(35, k, torch.bfloat16, "cpu")
    gain = torch.linspace(0.5, 1.5, k) if normed else None
    one, two, four = [form for form in small_forms(False) if form.row_tiles == rows]
    alone = torch.cat([run(matrix, x[t : t + 1], one, gain=gain) for t in range(35)])
    for first, last, form in ((0, 8, one), (0, 16, two), (3, 20, four), (0, 35, four), (2, 35, one)):
        assert torch.equal(run(matrix, x[first:last], form, gain=gain, seed=1), alone[first:last])


@needs_compiler
def test_rows_of_x_and_of_the_residual_may_lie_apart() -> None:
    matrix = random_matrix(24, 64, torch.bfloat16, "cpu")
    wide, added = (
        random_rows(6, 160, torch.bfloat16, "cpu"),
        random_rows(6, 31, torch.bfloat16, "cpu", seed=3),
    )
    x, residual = wide[:, 32:96], added[:, 5:29]
    form = SmallForm(16, 1, 2, 1)
    y = run(matrix, x, form, residual=residual)
    assert torch.equal(y, run(matrix, x.contiguous(), form, residual=residual.contiguous()))


@needs_compiler
def test_nothing_but_a_rows_own_numbers_enters() -> None:
    matrix, x = random_matrix(9, 264, torch.float16, "cpu"), random_rows(4, 264, torch.float16, "cpu")
    form = SmallForm(16, 1, 2, 1)
    y = run(matrix, x, form)
    x[1] = float("nan")
    spoiled = run(matrix, x, form, arch=800)
    assert bool(spoiled[1].isnan().all())
    assert torch.equal(spoiled[[0, 2, 3]], y[[0, 2, 3]])


def test_forms_of_a_shape_have_as_many_pieces_at_any_number_of_tokens() -> None:
    for target in ("sm_80", "sm_90a", "sm_120a", "compute_80"):
        for n, k in ((1, 2048), (96, 5120), (257, 2048), (1024, 5120), (5120, 6144), (248320, 5120)):
            forms = [choose_small_form(n, k, m, target) for m in range(1, MAX_TOKENS + 1)]
            assert len({(form.pieces, form.row_tiles) for form in forms}) == 1
            assert target == "sm_90a" or all(form.cluster == 1 for form in forms)
    assert choose_small_form(96, 5120, 9, "sm_90a").cluster == 4
    # Few rows are read sooner by four SMs together; with more rows that takes more columns or more tokens.
    for n, k, clustered in ((64, 1024, 1), (128, 2048, 1), (129, 2048, 9), (528, 4096, 1), (96, 5120, 1)):
        found = [choose_small_form(n, k, m, "sm_90a").cluster for m in (1, 8, 9, 64)]
        assert found == [4 if m >= clustered else 1 for m in (1, 8, 9, 64)]
    assert choose_small_form(529, 5120, 9, "sm_90a").cluster == 1


def test_every_form_that_may_be_chosen_is_compiled_ahead() -> None:
    compiled = {
        (tuple(sorted(one.defines.items())), target) for one in INSTANTIATIONS for target in one.targets
    }
    for target in ("sm_80", "sm_90a", "sm_121a"):
        for n, k in ((1, 2048), (96, 5120), (5120, 6144)):
            for m in (1, 16, 17, 64):
                for variant in ({"VT_F16": 0, "VT_NORM": 1}, {"VT_F16": 1, "VT_NORM": 0}):
                    defines = {**choose_small_form(n, k, m, target).defines, **variant}
                    assert (tuple(sorted(defines.items())), target) in compiled


def test_stacked_parts_keep_their_rows_and_biases() -> None:
    parts = [
        PlainWeight(tensor=torch.randn(n, 16).bfloat16(), bias=torch.arange(float(n)).bfloat16())
        for n in (3, 5)
    ]
    matrix = stack_rows(parts)
    assert torch.equal(matrix.rows, torch.cat([part.tensor for part in parts]))
    assert matrix.bias is not None
    assert matrix.bias.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert (matrix.shape, matrix.nbytes) == ((8, 16), 8 * 16 * 2 + 8 * 4)


def test_one_weight_is_not_copied() -> None:
    tensor = torch.randn(4, 8).bfloat16()
    assert stack_rows([PlainWeight(tensor=tensor)]).rows.data_ptr() == tensor.data_ptr()


def test_parts_that_do_not_go_together_are_refused() -> None:
    one, other = PlainWeight(tensor=torch.ones(2, 8).bfloat16()), PlainWeight(tensor=torch.ones(2, 8).half())
    with pytest.raises(RequestError, match="share dtype and device"):
        stack_rows([one, other])
    with pytest.raises(RequestError, match="only some parts have a bias"):
        stack_rows([one, PlainWeight(tensor=one.tensor, bias=torch.ones(2))])
