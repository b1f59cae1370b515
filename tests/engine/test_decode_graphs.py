"""Replays of decode graphs beside launches of other threads; without a GPU."""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtensors_engine.cuda import decode_graphs
from vtensors_engine.cuda.decode_graphs import DecodeGraphs, _Captured
from vtensors_engine.cuda.device_rows import DeviceRows


def test_a_graph_is_replayed_in_the_turn_of_the_workspace_that_its_kernels_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn, held = Lock(), []
    monkeypatch.setattr(decode_graphs, "workspace_here", lambda device: SimpleNamespace(turn=turn))
    graph: Any = SimpleNamespace(replay=lambda: held.append(turn.locked()))
    decoder: Any = None
    graphs = DecodeGraphs(decoder=decoder, rows=DeviceRows.empty(4, 2, 4, torch.device("cpu")))
    logits = torch.zeros(4, 8)
    graphs._captured[4] = _Captured(graph=graph, logits=logits)
    assert graphs.step(4) is logits
    assert (held, turn.locked()) == ([True], False)
