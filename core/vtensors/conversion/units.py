"""What becomes of each module: the records that a plan is made of."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from vtensors.conversion.layout import PlannedTensor
from vtensors.conversion.parts import StoredPart
from vtensors.records import Claim, Convention, EncodeOptions, Encoder, WeightToWrite


class Fate(enum.Enum):
    """What becomes of a module."""

    KEPT = "kept"
    """Names and bytes as stored."""
    RESPELLED = "respelled"
    """Same codes and block scales under the target's names; global scales may become their reciprocal."""
    DEQUANTIZED = "dequantized"
    """Values in a float dtype."""
    QUANTIZED = "quantized"
    """Float values made into codes and scales."""
    REQUANTIZED = "requantized"
    """Codes of one scheme made into codes of another: a second rounding."""


@attrs.frozen(kw_only=True)
class Assignment:
    """A module's new scheme. partners: modules whose largest magnitude is shared, the module itself included."""

    scheme: str
    options: EncodeOptions = attrs.field(factory=EncodeOptions)
    partners: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Remake:
    """How the values of a module are made anew.

    claim, convention: how they are read. encoder: what makes codes of them; None = a float dtype, `dtype`.
    fold: whether the activation pre-scale is multiplied into the weight.
    """

    claim: Claim
    convention: Convention
    encoder: Encoder | None
    dtype: str
    options: EncodeOptions
    partners: tuple[str, ...] = ()
    fold: bool = False


@attrs.frozen(kw_only=True)
class Unit:
    """A module, a stacked tensor that stays, or a loose tensor, with everything that is written for it.

    before, after: scheme and convention in words. parts: role -> stored bytes of the tensors that are copied.
    remake: for the other roles. left_out: one sentence for every source tensor that is not written.
    weight: as the writer saw it; None for what is kept in plain floats. linear: whether it may be a linear
    layer, so that a declaration has to speak of it.
    """

    name: str
    fate: Fate
    before: str
    after: str
    tensors: tuple[PlannedTensor, ...]
    parts: Mapping[str, StoredPart]
    remake: Remake | None = None
    left_out: tuple[str, ...] = ()
    weight: WeightToWrite | None = None
    linear: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return sum(tensor.nbytes for tensor in self.tensors)
