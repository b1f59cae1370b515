"""`sample_token` on a CUDA device: the token of the reference for any length, number of rows and setting.

Another token than the reference's is right only where the point lies within `EPS` of a boundary: see `rounding_allows`.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from drawing_cases import SETTINGS, logits_like, rounding_allows, settings_of
from nvfp4_cuda_cases import HALVES
from vtensors.errors import RequestError
from vtensors_kernels.reference.sample_token import kept_masses, sample_token
from vtensors_kernels.steps.sample_token import MAX_COLUMNS, SampleToken, probe_sample_token

pytestmark = pytest.mark.gpu

COLUMNS = [1, 7, 8, 255, 2049, 32000, 248320, 248321, MAX_COLUMNS]


def drawn(call: SampleToken, logits: Tensor, settings: Tensor) -> list[int]:
    """logits on the device, settings anywhere: what becomes of tokens that were -1."""
    rows = logits.shape[0]
    tokens = torch.full((rows,), -1, device="cuda")
    steps = torch.ones(rows, dtype=torch.int32, device="cuda")
    call(logits, settings.cuda(), logits.float().amax(-1), steps, tokens)
    return tokens.tolist()


def many_settings(points: tuple[float, ...]) -> Tensor:
    return torch.stack([settings_of(name, point) for name in SETTINGS for point in points])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_any_length_gives_the_references_token_or_one_that_rounding_cannot_tell_from_it(
    columns: int, dtype: torch.dtype
) -> None:
    call = SampleToken("cuda", dtype)
    settings = many_settings((0.31,) if columns > 10_000 else (0.0, 0.31, 1 - 2.0**-53))
    count, wanted = len(settings), torch.full((len(settings),), -1)
    for kind in ("model", "ties"):
        row = logits_like(kind, columns, dtype)
        sample_token(
            row.expand(count, -1), settings, row.max().float().expand(count), torch.ones(count), wanted
        )
        found = drawn(call, row.cuda().repeat(count, 1), settings)
        others = [index for index in range(count) if found[index] != wanted[index]]
        print(f"{kind} {columns}: {len(others)} of {count} differ from the reference")
        for index in others:
            assert rounding_allows(row, settings[index], found[index]), settings[index].tolist()
    probe_sample_token(columns, dtype, torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_token_is_drawn_in_the_midst_of_what_it_has(dtype: torch.dtype) -> None:
    call, row = SampleToken("cuda", dtype), logits_like("ties", 3000, dtype)
    for name in SETTINGS:
        masses = kept_masses(row, settings_of(name, 0.0))
        whole, kept = int(masses.sum()), masses.nonzero()[:, 0].tolist()
        chosen = [token for token in kept if int(masses[token]) > whole >> 18]
        middles = [(int(masses[:token].sum()) + int(masses[token]) // 2) / whole for token in chosen]
        settings = torch.stack([settings_of(name, point) for point in middles])
        assert drawn(call, row.cuda().repeat(len(chosen), 1), settings) == chosen, name


def test_a_row_draws_the_same_token_in_any_company_and_every_time() -> None:
    call, settings = SampleToken("cuda", torch.bfloat16), many_settings((0.1, 0.77))
    rows = torch.stack(
        [logits_like("model", 248_320, torch.bfloat16, seed=i) for i in range(len(settings))]
    ).cuda()
    together = drawn(call, rows, settings)
    for _ in range(10):
        assert drawn(call, rows, settings) == together
    for index in range(len(settings)):
        alone = slice(index, index + 1)
        assert drawn(call, rows[alone], settings[alone]) == together[alone]
    assert drawn(call, rows.flip(0), settings.flip(0)) == together[::-1]
    wide = torch.full((len(settings), 248_320 + 9), float("nan"), dtype=torch.bfloat16, device="cuda")
    for first in range(9):
        part = wide[:, first : first + 248_320]
        part.copy_(rows)
        assert drawn(call, part, settings) == together


def test_greedy_rows_padding_and_rows_without_a_finite_logit_keep_their_tokens() -> None:
    call = SampleToken("cuda", torch.bfloat16)
    logits = logits_like("model", 9001, torch.bfloat16).cuda().repeat(5, 1)
    logits[2, 77], logits[3, 8] = float("nan"), float("inf")
    settings = torch.stack([settings_of("all", 0.5)] * 5)
    settings[0, 0] = 0
    tokens, steps = torch.full((5,), -1, device="cuda"), torch.tensor([1, 0, 1, 1, 1]).int().cuda()
    call(logits, settings.cuda(), logits.float().amax(-1), steps, tokens)
    assert tokens.tolist()[:4] == [-1] * 4
    assert tokens.tolist()[4] >= 0


def test_a_graph_reads_settings_and_logits_anew_with_every_replay() -> None:
    call, row = SampleToken("cuda", torch.bfloat16), logits_like("model", 248_320, torch.bfloat16)
    logits, settings = row.cuda().repeat(3, 1), torch.stack([settings_of("all", 0.5)] * 3).cuda()
    largest, steps = logits.float().amax(-1), torch.ones(3, dtype=torch.int32, device="cuda")
    tokens = torch.zeros(3, dtype=torch.int64, device="cuda")
    call(logits, settings, largest, steps, tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(logits, settings, largest, steps, tokens)
    for turn in range(20):
        settings[:, 4] = torch.tensor([turn / 20, turn / 21, turn / 22])
        graph.replay()
        assert tokens.tolist() == drawn(call, logits, settings)


def test_what_does_not_fit_is_refused() -> None:
    call, logits = (
        SampleToken("cuda", torch.bfloat16),
        torch.zeros(2, 64, dtype=torch.bfloat16, device="cuda"),
    )
    settings, steps = many_settings((0.5,))[:2].cuda(), torch.ones(2, dtype=torch.int32, device="cuda")
    largest, tokens = torch.zeros(2, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    with pytest.raises(RequestError, match="settings do not fit"):
        call(logits, settings.float(), largest, steps, tokens)
    with pytest.raises(RequestError, match="settings do not fit"):
        call(logits, settings.repeat(1, 2)[:, ::2], largest, steps, tokens)
    with pytest.raises(RequestError, match="tokens do not fit"):
        call(logits, settings, largest, steps, steps)
    wide = torch.zeros(2, MAX_COLUMNS + 1, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RequestError, match="too large"):
        call(wide, settings, largest, steps, tokens)


@pytest.mark.parametrize("name", ["plain", "m", "k", "p", "k and p", "flat p", "hottest p"])
def test_thirty_two_rows_take_some_tens_of_microseconds(name: str) -> None:
    call = SampleToken("cuda", torch.bfloat16)
    for rows in (1, 32):
        logits = torch.stack(
            [logits_like("model", 248_320, torch.bfloat16, seed=i) for i in range(rows)]
        ).cuda()
        settings = torch.stack([settings_of(name, 0.5)] * rows).cuda()
        largest, steps = logits.float().amax(-1), torch.ones(rows, dtype=torch.int32, device="cuda")
        tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        call(logits, settings, largest, steps, tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                call(logits, settings, largest, steps, tokens)
        graph.replay()
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - started) / 50 * 1e6
        print(f"{name}, {rows} rows: {taken:.1f} us")
        assert taken < 1000
