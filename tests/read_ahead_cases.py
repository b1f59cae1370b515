"""What tests of weights read ahead compare: the modules of a checkpoint, and every bit of a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.checkpoint import Checkpoint
from vtensors_formats import Weight
from vtensors_plugins.architectures.checkpoint_inputs import planned_modules


def modules_of(checkpoint: Checkpoint) -> list[str]:
    return list(dict.fromkeys(planned_modules(checkpoint).values()))


def tensors_of(weight: object) -> list[Tensor]:
    assert isinstance(weight, Weight)
    found = [*weight.stored(), *(t for t in (weight.bias, weight.pre_scale) if t is not None)]
    scale = getattr(weight.activation, "scale", getattr(weight.activation, "global_scale", None))
    return found if scale is None else [*found, scale]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
