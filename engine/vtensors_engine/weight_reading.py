"""The weights of a model as its builder asks for them, on the device, with the progress told."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import attrs
import torch

from vtensors.checkpoint import Checkpoint
from vtensors.records import Progress, Weight
from vtensors_engine.read_ahead import ReadAhead
from vtensors_formats import PlainWeight
from vtensors_formats import Weight as CanonicalWeight
from vtensors_plugins.architectures.checkpoint_inputs import HEAD, dequantizes_head

_log = logging.getLogger("vtensors")
_TOLD_EVERY = 256


@attrs.define(kw_only=True, eq=False)
class WeightReading:
    """On a CPU weights are views of the files; to CUDA they are read ahead through pinned memory.

    modules: canonical name -> module of the checkpoint, about in the order in which they will be asked for.
    dtype: that the head is dequantized to, where `VT_LMHEAD_QUANTIZED=0` asks for it.
    """

    checkpoint: Checkpoint
    modules: Mapping[str, str]
    device: torch.device
    dtype: torch.dtype
    _ahead: ReadAhead | None = attrs.field(init=False)
    _seen: set[str] = attrs.field(factory=set, init=False)

    @_ahead.default
    def _new_ahead(self) -> ReadAhead | None:
        if self.device.type != "cuda":
            return None
        return ReadAhead(self.checkpoint, list(dict.fromkeys(self.modules.values())), self.device)

    def read(self, name: str) -> Weight:
        """The weight of a canonical name, on the device. Errors: as `Checkpoint.read`."""
        if name not in self._seen and len(self._seen) % _TOLD_EVERY == 0:
            self.tell(len(self._seen))
        self._seen.add(name)
        module = self.modules[name]
        weight = self.checkpoint.read(module) if self._ahead is None else self._ahead.read(module)
        if name == HEAD and dequantizes_head(self.checkpoint):
            _log.warning("VT_LMHEAD_QUANTIZED=0: %s (%s) is dequantized at load", module, weight.scheme)
            bias = weight.bias if isinstance(weight, CanonicalWeight) else None
            weight = PlainWeight(tensor=weight.dequantize(self.dtype), bias=bias)
        return weight.to(self.device)

    def close(self) -> None:
        """No weight will be asked for any more."""
        if self._ahead is not None:
            self._ahead.close()

    def tell(self, done: int) -> None:
        """So many weights have been read."""
        total = len(self.modules)
        self.checkpoint.plugins.progress(Progress(task="load", done=done, total=total, unit="tensors"))
