"""Tensors that no convention reads and the architecture leaves alone: copied, or refused where they are codes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vtensors.checkpoint import Checkpoint
from vtensors.claim_reasons import Unclaimed
from vtensors.conversion.deciding import Target
from vtensors.conversion.layout import PlannedTensor
from vtensors.conversion.parts import StoredPart
from vtensors.conversion.units import Fate, Unit
from vtensors.errors import RequestError
from vtensors.forms import FLOAT_DTYPES
from vtensors.modules import is_quantized
from vtensors.records import Layout

# Buffers (position ids, masks, counters) mean the same in every convention.
_BUFFERS = (*FLOAT_DTYPES, "F64", "I64", "I32", "BOOL")
_COMPANION = re.compile(
    r"(^|_)(scale|scales|zero_point|zeros|packed|qweight|qzeros|g_idx|absmax|blocks)(_|$)"
)


def loose_units(checkpoint: Checkpoint, target: Target) -> Iterator[Unit]:
    """One unit per group of waived tensors that nobody reads, copied as stored.

    Raises RequestError for codes or scales that would come under another convention's configuration: what they
    mean is not known, so nobody could say it in the target.
    """
    writers = {m.convention for m in checkpoint.modules.values() if is_quantized(m.scheme)}
    same = writers <= {target.convention.name}
    for name, unclaimed in checkpoint.claims.unclaimed.items():
        if not same:
            _refuse_codes(name, unclaimed, target)
        infos = unclaimed.group.tensors
        yield Unit(
            name=name,
            fate=Fate.KEPT,
            before="not read",
            after="not read",
            tensors=tuple(
                PlannedTensor(name=info.name, dtype=info.dtype, shape=info.shape, role=suffix)
                for suffix, info in infos.items()
            ),
            parts={
                suffix: StoredPart(
                    info=info,
                    layout=Layout(dtype=info.dtype, shape=info.shape),
                    begin=info.begin,
                    end=info.end,
                )
                for suffix, info in infos.items()
            },
        )


def _refuse_codes(name: str, unclaimed: Unclaimed, target: Target) -> None:
    for suffix, info in unclaimed.group.tensors.items():
        if info.dtype not in _BUFFERS or _COMPANION.search(suffix):
            raise RequestError(
                f"no convention reads this tensor, so {target.convention.name} cannot say what it means",
                file=info.file,
                tensor=info.name,
                seen=unclaimed.describe(),
                accepted="tensors that a convention reads, or plain buffers",
                fix=f"install a plugin that reads '{name}', or remove its tensors from the checkpoint",
            )
