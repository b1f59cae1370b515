"""Steps whose results are still on their way from the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_engine.cuda.device_rows import DeviceRows
from vtensors_engine.sampling import not_finite


@attrs.frozen(kw_only=True, eq=False)
class DeviceStep:
    """One token of some rows. See `Step`.

    chosen: [R] int64 and largest: [R] float32, on the host once `ready` has happened. places: the row of each
    sequence, in the order of the request. scores: [R, V] on the device.
    """

    chosen: Tensor
    largest: Tensor
    scores: Tensor
    ready: torch.cuda.Event
    places: Sequence[int]

    def tokens(self) -> list[int]:
        """The chosen token of each sequence; waits for the device. See `Step`."""
        self.ready.synchronize()
        chosen = self.chosen.tolist()
        return [chosen[place] for place in self.places]

    def failures(self) -> Mapping[int, VtensorsError]:
        """Sequence -> why it has no token: its largest logit is not finite. Waits for the device."""
        self.ready.synchronize()
        largest = self.largest.tolist()
        return {
            index: not_finite(self.scores.shape[1], largest[place])
            for index, place in enumerate(self.places)
            if not math.isfinite(largest[place])
        }

    def logits(self) -> Tensor:
        """[B, V] in the model's dtype on the device, a row per sequence; valid until the next prefill or decode."""
        if list(self.places) == list(range(len(self.places))):
            return self.scores[: len(self.places)]
        return self.scores[list(self.places)]


def new_step(scores: Tensor, rows: DeviceRows, places: Sequence[int]) -> DeviceStep:
    """The step of rows whose work is queued on the current stream. scores: its logits [R, V]."""
    chosen = torch.empty(rows.tokens.shape, dtype=torch.int64, pin_memory=True)
    largest = torch.empty(rows.largest.shape, dtype=torch.float32, pin_memory=True)
    chosen.copy_(rows.tokens, non_blocking=True)
    largest.copy_(rows.largest, non_blocking=True)
    ready = torch.cuda.current_stream(rows.tokens.device).record_event()
    return DeviceStep(chosen=chosen, largest=largest, scores=scores, ready=ready, places=places)
