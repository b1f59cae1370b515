"""Who reads which module: groups of tensors, claims, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from vtensors.forms import Form
from vtensors.records.declarations import Declaration, DeclaredScheme
from vtensors.tensors import TensorInfo


@attrs.frozen(kw_only=True, slots=True)
class TensorGroup:
    """The tensors of one module. tensors: suffix behind the module name -> TensorInfo."""

    module: str
    tensors: Mapping[str, TensorInfo]


@attrs.frozen(kw_only=True, slots=True)
class Claim:
    """One convention's statement that it can read a module, with what it found.

    module: name of the weight, as in the checkpoint; an expert inside a stacked tensor has a name of its own.
    scheme: canonical scheme. shape: logical (N, K), or the tensor's own shape where it is not a matrix.
    roles: role -> TensorInfo. form: the accepted form that fits. part: where the matrix lies in a stacked
    tensor, or None. declared: what this convention's configuration says of the module.
    """

    module: str
    convention: str
    scheme: str
    shape: tuple[int, ...]
    roles: Mapping[str, TensorInfo]
    form: Form
    part: StackedPart | None = None
    declared: DeclaredScheme | None = None

    @property
    def codes(self) -> TensorInfo:
        """The tensor in the role `codes`, the first one where a convention has no such role."""
        return self.roles.get("codes") or next(iter(self.roles.values()))


@attrs.frozen(kw_only=True, slots=True)
class StackedPart:
    """Where one expert's matrix lies in a stacked tensor [E, rows, K] (or [E, K, rows] when transposed)."""

    expert: int
    row_begin: int
    row_end: int
    transposed: bool = False


@attrs.frozen(kw_only=True, slots=True)
class Refusal:
    """Why a convention does not claim a group."""

    module: str
    reason: str


@attrs.frozen(kw_only=True)
class ClaimRequest:
    """All groups of a checkpoint, with this convention's declaration (None: it declared nothing)."""

    groups: Sequence[TensorGroup]
    declaration: Declaration | None
