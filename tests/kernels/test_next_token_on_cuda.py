"""`next_token` on a CUDA device: the reference's token for any length and number of rows, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4_cuda_cases import HALVES, make_x
from vtensors.errors import RequestError
from vtensors_kernels.reference.next_token import next_token
from vtensors_kernels.steps.next_token import NextToken, probe_next_token

pytestmark = pytest.mark.gpu


def fresh(rows: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """tokens, positions, largest."""
    tokens = torch.arange(rows) - 1000
    return (
        tokens.to(device),
        torch.arange(rows, dtype=torch.int32).to(device),
        torch.full((rows,), 7.0).to(device),
    )


def check(call: NextToken, logits: Tensor) -> None:
    rows = logits.shape[0]
    steps = (torch.arange(rows, dtype=torch.int32) + 1) % 3
    ours, wanted = fresh(rows), fresh(rows, "cpu")
    call(logits, ours[0], ours[1], steps.cuda(), ours[2])
    next_token(logits.cpu(), wanted[0], wanted[1], steps, wanted[2])
    for found, expected in zip(ours, wanted, strict=True):
        assert torch.equal(found.cpu().nan_to_num(nan=-7), expected.nan_to_num(nan=-7))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [1, 7, 8, 255, 2049, 32000, 151936, 248320, 248321])
def test_any_length_and_number_of_rows_gives_the_references_token(columns: int, dtype: torch.dtype) -> None:
    call, logits = NextToken("cuda", dtype), make_x(33, columns, dtype)
    logits[3] = logits[3].round()  # equals
    logits[4] = float("nan")
    logits[5, ::2] = float("nan")
    logits[6] = float("-inf")
    for rows in (1, 2, 7, 33):
        check(call, logits[:rows])
    probe_next_token(columns, dtype, logits.device)


def test_more_rows_than_one_launch_takes() -> None:
    check(NextToken("cuda", torch.bfloat16), make_x(1100, 300, torch.bfloat16))


def test_rows_may_be_slices_at_any_even_address() -> None:
    call, wide = NextToken("cuda", torch.bfloat16), make_x(5, 20011, torch.bfloat16)
    for first in range(9):
        check(call, wide[:, first : first + 20001])


def test_a_graph_moves_on_with_every_replay() -> None:
    call, logits, steps = NextToken("cuda", torch.bfloat16), make_x(4, 248320, torch.bfloat16), [1, 0, 1, 2]
    tokens, positions, largest = fresh(4)
    moved = torch.tensor(steps, dtype=torch.int32).cuda()
    call(logits, *fresh(4)[:2], moved, largest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(logits, tokens, positions, moved, largest)
    for turn in range(50):
        logits[:, turn] = 100 + turn
        graph.replay()
        assert tokens.tolist() == [turn, -999, turn, turn]
        assert positions.tolist() == [i + (turn + 1) * step for i, step in enumerate(steps)]
        assert largest.tolist() == [100 + turn] * 4


def test_what_does_not_fit_is_refused() -> None:
    call, logits = NextToken("cuda", torch.bfloat16), make_x(2, 64, torch.bfloat16)
    tokens, positions, largest = fresh(2)
    steps = positions.clone()
    with pytest.raises(RequestError, match="tokens do not fit"):
        call(logits, positions, positions, steps, largest)
    with pytest.raises(RequestError, match="largest logits do not fit"):
        call(logits, tokens, positions, steps, largest[:1])
    with pytest.raises(RequestError, match="logits do not fit"):
        call(logits.float(), tokens, positions, steps, largest)
