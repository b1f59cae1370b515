"""Decode steps as CUDA graphs, one per number of rows; a replay takes every row one token further by itself."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors_engine.cuda.device_rows import DeviceRows
from vtensors_engine.cuda.paged_decoder import PagedDecoder
from vtensors_plugins.backends.cuda_calls import workspace_here


@attrs.frozen(kw_only=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


@attrs.define(kw_only=True, eq=False)
class DecodeGraphs:
    """Steps of the first B rows. eager: launch them one by one instead, with the same results."""

    decoder: PagedDecoder
    rows: DeviceRows
    eager: bool = False
    _captured: dict[int, _Captured] = attrs.field(factory=dict, init=False)

    def step(self, rows: int) -> Tensor:
        """One token of each of the first so many rows: logits [B, V], valid until the next step.

        Afterwards the token of a running row is its largest logit and its position the next.
        """
        if self.eager:
            return self._launch(self.rows.first(rows))
        if rows not in self._captured:
            self.capture(rows)
        captured = self._captured[rows]
        # A replay writes to the workspace that other models of the stream launch over, maybe from another thread.
        with workspace_here(self.rows.tokens.device).turn:
            captured.graph.replay()
        return captured.logits

    def capture(self, rows: int) -> None:
        """Records the step of so many rows; nothing that sequences have is touched.

        It runs once before it is recorded, over padding alone, so that every kernel is compiled and loaded.
        """
        if rows in self._captured:
            return
        own = self.rows.first(rows)
        padding = DeviceRows.empty(
            rows, own.page_table.shape[1], self.rows.dummy_slot, device=own.tokens.device
        )
        self._launch(padding)
        torch.cuda.synchronize(own.tokens.device)
        graph = torch.cuda.CUDAGraph()
        # torch's own stream for captures is one of the device that was captured on first, whichever that was.
        stream: torch.cuda.Stream = torch.cuda.Stream(own.tokens.device)  # type: ignore[no-untyped-call]
        # Graphs run one after the other, so that they can share their memory.
        with torch.cuda.graph(graph, pool=self._first_pool(), stream=stream):
            logits = self._launch(own)
        self._captured[rows] = _Captured(graph=graph, logits=logits)

    def _first_pool(self) -> Any:
        return next((captured.graph.pool() for captured in self._captured.values()), None)

    def _launch(self, rows: DeviceRows) -> Tensor:
        logits = self.decoder.decode(rows)
        self.decoder.advance(rows, logits)
        return logits
