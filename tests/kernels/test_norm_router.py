"""`norm_router` emulated with clusters of one block: the bits of the norm, the product and the choice one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from vtensors_kernels.plain.probe import random_matrix
from vtensors_kernels.plain.small_form import SmallForm
from vtensors_kernels.steps.norm_router import (
    FORM,
    FUNCTION,
    INSTANTIATIONS,
    SOURCE,
    RouterForm,
    serves_on,
)
from vtensors_kernels.steps.rms_norm import NormForm

EPS = 1e-6
ALONE = RouterForm(cluster=1)
Routed = tuple[Tensor, Tensor, Tensor, Tensor]


def routed(h: Tensor, gain: Tensor, w: Tensor, experts: int, top: int, seed: int = 0) -> Routed:
    """x, chosen, weights and the other gates' logits, all spoilt before; h: rows any distance apart."""
    (n, k), m = w.shape, h.shape[0]
    x, gates = (
        torch.full((m, k), float("nan")).to(h.dtype),
        torch.full((m, n - experts), float("nan")).to(h.dtype),
    )
    chosen, weights = torch.full((m, top), -1, dtype=torch.int32), torch.full((m, top), float("nan"))
    emulate(
        SOURCE,
        FUNCTION,
        {**ALONE.defines, "VT_F16": int(h.dtype == torch.float16)},
        (1, -(-m // 8)),
        (512,),
        [h, gain, w, x, gates, chosen, weights, EPS, m, n, experts, k, top, h.stride(0)],
        shared_bytes=ALONE.shared_bytes,
        seed=seed,
    )
    return x, chosen, weights, gates


def step_by_step(h: Tensor, gain: Tensor, w: Tensor, experts: int, top: int) -> Routed:
    """The same by `rms_norm`, `linear_plain_small` and `router_topk`."""
    (n, k), m, f16 = w.shape, h.shape[0], int(h.dtype == torch.float16)
    x, logits = torch.empty(m, k, dtype=h.dtype), torch.empty(m, n, dtype=h.dtype)
    chosen, weights = torch.empty(m, top, dtype=torch.int32), torch.empty(m, top)
    norm, small = NormForm.of(k), SmallForm(16, 1, 2, 1)
    emulate(
        "common/rms_norm.cu",
        "rms_norm",
        {"VT_F16": f16, "VT_CHUNKS": norm.chunks},
        (m,),
        (norm.threads,),
        [h, gain, x, h.stride(0), k, EPS],
        shared_bytes=norm.shared_bytes,
    )
    emulate(
        "common/linear_plain_small.cu",
        "linear_plain_small",
        {**small.defines, "VT_F16": f16, "VT_NORM": 0},
        small.grid(n, m),
        (512,),
        [w, x, logits, None, None, None, EPS, m, n, k, k, 0],
    )
    emulate(
        "common/router_topk.cu",
        "router_topk",
        {"VT_F16": f16, "VT_PER_LANE": 8},
        (-(-m // 4),),
        (128,),
        [logits, chosen, weights, n, m, experts, top],
    )
    return x, chosen, weights, logits[:, experts:]


def inputs(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """h with rows apart, gain, w."""
    wide = torch.randn(m, k + 24, generator=torch.Generator().manual_seed(k)) * 3
    return wide.to(dtype)[:, 8 : 8 + k], torch.linspace(-0.5, 1.5, k), random_matrix(n, k, dtype, "cpu").rows


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    ("m", "n", "experts", "k", "top"),
    [(1, 40, 39, 2048, 4), (11, 33, 32, 1096, 8), (8, 17, 15, 2040, 2), (9, 5, 5, 64, 5), (3, 1, 1, 8, 1)],
)
def test_it_gives_the_bits_of_its_steps(
    m: int, n: int, experts: int, k: int, top: int, dtype: torch.dtype
) -> None:
    h, gain, w = inputs(m, n, k, dtype)
    wanted = step_by_step(h, gain, w, experts, top)
    for seed in (0, 1):
        for one, other in zip(routed(h, gain, w, experts, top, seed), wanted, strict=True):
            assert torch.equal(one, other)


@needs_compiler
def test_a_token_depends_on_nothing_but_itself() -> None:
    h, gain, w = inputs(13, 20, 328, torch.bfloat16)
    wanted = routed(h, gain, w, 19, 3)
    spoilt = h.clone()
    spoilt[4] = float("nan")
    for first, last, given in ((0, 13, spoilt), (5, 6, h), (6, 13, h)):
        found = routed(given[first:last], gain, w, 19, 3)
        kept = [row for row in range(first, last) if given is h or row != 4]
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one[[row - first for row in kept]], other[kept])


def test_what_the_form_serves() -> None:
    assert FORM.serves(257, 2048, 256)
    assert FORM.serves(128, 2048, 128)
    assert not FORM.serves(257, 2056, 256)
    assert not FORM.serves(321, 2048, 256)
    assert not FORM.serves(300, 2048, 257)
    assert not FORM.serves(64, 2044, 64)
    assert not FORM.serves(64, 2048, 65)
    assert serves_on((9, 0), (257, 2048), 256, 32)
    assert not serves_on((9, 0), (257, 2048), 256, 33)
    assert not serves_on((9, 0), (17, 2048), 16, 17)
    assert not serves_on((8, 9), (257, 2048), 256, 8)
    assert not serves_on((12, 1), (257, 2048), 256, 8)
    assert "320 rows of up to 2048 columns" in FORM.most_in_words()
    assert all(one.targets == ("sm_90a",) and one.hot for one in INSTANTIATIONS)
    assert ALONE.shared_bytes % 16 == 0


@needs_compiler
def test_equal_logits_and_those_that_are_no_numbers_are_ranked_as_step_by_step() -> None:
    h, gain, w = inputs(9, 21, 72, torch.bfloat16)
    w[5] = w[2]  # equal logits everywhere
    w[7, 3] = float("inf")  # one that is infinite or no number
    h[3] = float("nan")
    h[4] = 0.0
    h[8, 0] = float("inf")
    wanted = step_by_step(h, gain, w, 20, 6)
    for one, other in zip(routed(h, gain, w, 20, 6), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert wanted[1][3].tolist() == [0, 1, 2, 3, 4, 5]
