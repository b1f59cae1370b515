"""Rows of a decode batch: the settings of those that are sampled, as the drawing kernel takes them."""

from __future__ import annotations

import torch

from vtensors_engine.cuda.device_rows import DeviceRows
from vtensors_engine.drawing import Draw
from vtensors_kernels.reference.sample_token import sample_token

DRAW = Draw(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, point=0.25)


def test_rows_without_a_draw_are_greedy_also_where_they_had_one_before() -> None:
    rows = DeviceRows.empty(6, 1, 0, torch.device("cpu"))
    first = rows.first(4)
    first.give_draws({1: DRAW, 3: DRAW})
    first.give_draws({2: DRAW})
    wanted = torch.zeros(6, 5, dtype=torch.float64)
    wanted[2] = torch.tensor([0.7, 3, 0.9, 0.1, 0.25], dtype=torch.float64)
    assert torch.equal(rows.draws, wanted)


def test_the_settings_draw_tokens_of_running_rows_alone() -> None:
    rows = DeviceRows.empty(3, 1, 0, torch.device("cpu"))
    rows.steps[:2] = 1
    rows.give_draws({0: DRAW, 2: DRAW})
    logits = torch.tensor([5.0, 5.0, 5.0, 5.0]).expand(3, -1)
    rows.tokens.fill_(9)
    # Of tokens 0, 1 and 2 with a third each.
    rows.draws[0, 4] = 0.4
    sample_token(logits, rows.draws, logits.amax(-1), rows.steps, rows.tokens)
    assert rows.tokens.tolist() == [1, 9, 9]
