"""Model families: what they expect of a checkpoint and how they are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, slots=True)
class ExpectedWeight:
    """One weight that a model needs.

    module: name in the checkpoint. shape: logical shape. part: `attention`, `linear_attention`, `mlp`,
    `experts`, `shared_expert`, `router`, `lm_head`, `embeddings`, `norm` or `other`.
    layer: index or None. required: False for a weight that may be absent.
    bias: whether a bias comes with it; None = either way.
    """

    module: str
    shape: tuple[int, ...]
    part: str
    layer: int | None = None
    required: bool = True
    bias: bool | None = None


@attrs.frozen(kw_only=True)
class Waiver:
    """Tensors that are left alone on purpose. prefix: start of the tensor name; reason: why."""

    prefix: str
    reason: str


@attrs.frozen(kw_only=True)
class ModelPlan:
    """What an architecture expects of a checkpoint; made from config and names alone, without torch.

    weights: the model's own (canonical) name -> ExpectedWeight. waivers: prefixes left alone.
    tied_head: canonical name of the head if it may be shared with the embeddings, else None.
    """

    weights: Mapping[str, ExpectedWeight]
    waivers: tuple[Waiver, ...] = ()
    notes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Architecture:
    """A model family.

    matches: the `config.json` dictionary -> whether this is the family.
    plan: (config, module names of the checkpoint) -> ModelPlan; torch-free.
    build: dotted path `package.module:function`, called as `function(config, weights, options)` where
    weights maps canonical names to Weights and options is the engine's `BuildOptions`; returns a Model.
    """

    name: str
    summary: str
    model_types: tuple[str, ...]
    matches: Callable[[Mapping[str, Any]], bool]
    plan: Callable[[Mapping[str, Any], Sequence[str]], ModelPlan]
    build: str


class Model(Protocol):
    """A model that can be run; built by an architecture plugin."""

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor: ...
