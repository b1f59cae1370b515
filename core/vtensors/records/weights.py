"""Number formats and conventions, and the Protocols of what they give: weights and stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import attrs

from vtensors.forms import Form
from vtensors.records.claims import Claim, ClaimRequest, Refusal
from vtensors.records.declarations import Declaration
from vtensors.records.writing import ConventionWriter
from vtensors.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

    from vtensors.configs import ConfigFiles


class Weight(Protocol):
    """A weight in canonical form. The classes live in `vtensors_formats` and in scheme plugins."""

    @property
    def scheme(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def dequantize(self, dtype: torch.dtype = ...) -> torch.Tensor: ...
    def rows(self, start: int, stop: int) -> Weight: ...
    def to(self, device: torch.device | str) -> Weight: ...
    def check_values(self, names: Mapping[str, str]) -> None: ...


class TensorSource(Protocol):
    """Gives torch tensors for header entries; conventions read through it.

    view: the stored bytes as a torch tensor of the header's dtype and shape (zero-copy where mapped);
    F8_E8M0 and F4 come as uint8, F8_E4M3 as float8_e4m3fn.
    """

    def view(self, info: TensorInfo) -> torch.Tensor: ...


@attrs.frozen(kw_only=True)
class Scheme:
    """A number format. weight_class: dotted path `package.module:Class`, imported when first needed.

    encoder: dotted path of an `Encoder` object that makes such weights; None = they can only be read.
    """

    name: str
    summary: str
    bits_per_weight: str
    weight_class: str
    encoder: str | None = None


@attrs.frozen(kw_only=True)
class Convention:
    """How one publisher spells weights on disk.

    declare: configuration files -> Declaration, or None when they are not this convention's.
    read: a claim -> canonical Weight; reads only the claim's tensors.
    claim: all groups at once -> claims and refusals; None = by the forms (see `vtensors.claiming`).
    forms: every accepted spelling; the docs and error messages are made from them.
    overrides: names of conventions that this one replaces where both claim a tensor.
    quant_methods: values of `quant_method` that it answers to, for messages.
    write: how it is written; None = it is no target of `convert`.
    """

    name: str
    summary: str
    forms: tuple[Form, ...]
    declare: Callable[[ConfigFiles], Declaration | None]
    read: Callable[[Claim, TensorSource], Weight]
    claim: Callable[[ClaimRequest], list[Claim | Refusal]] | None = None
    overrides: tuple[str, ...] = ()
    quant_methods: tuple[str, ...] = ()
    write: ConventionWriter | None = None
