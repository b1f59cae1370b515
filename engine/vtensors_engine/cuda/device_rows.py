"""The rows of a decode batch as the kernels read them; changed by small copies in the order of the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from vtensors_engine.drawing import Draw
from vtensors_kernels.reference.sample_token import SETTINGS


@attrs.frozen(kw_only=True, eq=False)
class DeviceRows:
    """One row per running sequence; the others are padding.

    tokens: [R] int64, the next to process. positions: [R] int32, its place in the sequence. steps: [R] int32, 1 where
    a sequence runs, else 0. slots: [R] int32. page_table: [R, P] int32, its pages in order, page 0 beyond them.
    largest: [R] float32, the largest logit behind the last token. draws: [R, 5] float64, how the last tokens that were
    drawn were drawn: columns as in `vtensors_kernels.reference.sample_token.SETTINGS`.
    """

    tokens: Tensor
    positions: Tensor
    steps: Tensor
    slots: Tensor
    page_table: Tensor
    largest: Tensor
    draws: Tensor
    dummy_slot: int

    @classmethod
    def empty(cls, rows: int, pages: int, dummy_slot: int, device: torch.device) -> DeviceRows:
        """All rows are padding. pages: the most of one sequence."""
        return cls(
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int32, device=device),
            steps=torch.zeros(rows, dtype=torch.int32, device=device),
            slots=torch.full((rows,), dummy_slot, dtype=torch.int32, device=device),
            page_table=torch.zeros(rows, pages, dtype=torch.int32, device=device),
            largest=torch.zeros(rows, device=device),
            draws=torch.zeros(rows, len(SETTINGS), dtype=torch.float64, device=device),
            dummy_slot=dummy_slot,
        )

    @classmethod
    def single(cls, dummy_slot: int, device: torch.device) -> DeviceRows:
        """One row that runs, for a token chosen outside of a batch."""
        row = cls.empty(1, 1, dummy_slot, device)
        row.steps.fill_(1)
        return row

    def first(self, rows: int) -> DeviceRows:
        """Views of the first so many rows."""
        return attrs.evolve(
            self,
            tokens=self.tokens[:rows],
            positions=self.positions[:rows],
            steps=self.steps[:rows],
            slots=self.slots[:rows],
            page_table=self.page_table[:rows],
            largest=self.largest[:rows],
            draws=self.draws[:rows],
        )

    def enter(self, row: int, *, token: Tensor, position: int, slot: int, pages: Sequence[int]) -> None:
        """A sequence begins to decode in the row. token: [1] int64 on the device."""
        self.tokens[row : row + 1].copy_(token)
        self._set(self.positions, row, position)
        self._set(self.steps, row, 1)
        self._set(self.slots, row, slot)
        listed = [*pages, *[0] * (self.page_table.shape[1] - len(pages))]
        self.page_table[row].copy_(on_device(listed, torch.int32, self.tokens.device))

    def move(self, source: int, target: int) -> None:
        """The sequence of the source row goes on in the target row; the source stays as it is."""
        for tensor in (self.tokens, self.positions, self.steps, self.slots, self.page_table):
            tensor[target].copy_(tensor[source])

    def leave(self, row: int) -> None:
        """The row becomes padding; nothing of its sequence stays, a token that no number came of neither."""
        self._set(self.tokens, row, 0)
        self._set(self.positions, row, 0)
        self._set(self.steps, row, 0)
        self._set(self.slots, row, self.dummy_slot)
        self.page_table[row].zero_()

    def give(self, tokens: Mapping[int, int]) -> None:
        """Tokens chosen on the host. row -> token id."""
        if tokens:
            device = self.tokens.device
            rows = on_device(list(tokens), torch.int64, device)
            self.tokens.index_copy_(0, rows, on_device(list(tokens.values()), torch.int64, device))

    def give_draws(self, draws: Mapping[int, Draw]) -> None:
        """How tokens are chosen behind this step. row -> draw; the largest logit in other rows, temperature 0."""
        settings = [
            [float(getattr(draws[row], name)) for name in SETTINGS] if row in draws else [0.0] * len(SETTINGS)
            for row in range(self.draws.shape[0])
        ]
        pinned = torch.tensor(settings, dtype=torch.float64, pin_memory=self.draws.is_cuda)
        self.draws.copy_(pinned, non_blocking=True)

    def _set(self, tensor: Tensor, row: int, value: int) -> None:
        tensor[row].fill_(value)


def on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor there, copied without waiting."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
